"""Tests the bench on real GPUs: whole runs by its command line, one process a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="the bench needs msgspec: put its wheel into .whl")
from unisono import records
from unisono.bench.cuda import device
from unisono.records.vocabulary import LAYOUTS

pytestmark = pytest.mark.gpu
BENCH = [sys.executable, "-m", "unisono"]
PEERS = "nccl,nccl-windows,torch-symm"


def gpus() -> int:
    return 0 if device.missing() is not None else device.count()


def needs(n: int) -> pytest.MarkDecorator:
    reason = device.missing() or f"needs {n} GPUs: this machine has {gpus()}"
    return pytest.mark.skipif(gpus() < n, reason=reason)


def run(
    *words: str, expect: int = 0, limit_s: float = 240.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")} | variables
    found = subprocess.run(
        [*BENCH, *words], env=env, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert found.returncode == expect, found.stdout[-4000:] + found.stderr[-4000:]
    return found


def bench(directory: Path, *words: str, expect: int = 0, **variables: str) -> records.Records:
    run("bench", "--device", "cuda", "-O", str(directory), "--no-report", *words, expect=expect, **variables)
    return records.read(directory)


@needs(2)
@pytest.mark.parametrize("memory", ["plain", "symmetric"])
def test_every_collective_is_right_in_every_mode(tmp_path: Path, memory: str) -> None:
    found = bench(
        tmp_path / "run",
        *f"--ranks 2 --backend unisono,nccl --memory {memory} --sizes 64,100K,3M -d bf16".split(),
        *"--mode all -n 6 --placement all".split(),
    )
    assert not found.failures
    assert not found.problems
    assert {r.case.mode for r in found.results} == {"graph", "events", "throughput", "latency"}
    assert {r.backend for r in found.results} == {"unisono", "nccl"}
    for result in found.results:
        assert result.verification.before and result.verification.after
        assert result.case.device == "cuda"
        assert min(result.samples_us) > 0
        if result.backend == "unisono":
            barrier = result.case.collective == "barrier"
            assert result.verification.bound == (
                "nobody left before all had entered" if barrier else "bit-exact"
            )
            assert result.sms is not None
    (head,) = found.runs
    assert len(head.machine.gpus) == 2
    assert head.environment["NCCL_NVLS_ENABLE"] == "0"
    assert any(ceiling.name == "ring" and ceiling.gbps > 1 for ceiling in found.ceilings)


@needs(2)
def test_all_peers_run_on_symmetric_memory(tmp_path: Path) -> None:
    found = bench(
        tmp_path / "run",
        *f"--ranks 2 --backend {PEERS} --memory symmetric --sizes 4K,1M -d bf16,f32 -n 6".split(),
        *"--collective all_reduce,all_gather,reduce_scatter,all_to_all_v".split(),
    )
    assert not found.failures
    assert not [skip for skip in found.skips if skip.case is None]
    assert {r.backend for r in found.results} == {
        "nccl",
        "nccl-windows",
        "torch-symm:one_shot",
        "torch-symm:two_shot",
    }


@needs(2)
@pytest.mark.parametrize("dtype", ["f16", "f64", "i8", "u8", "i32", "i64", "f8e4m3"])
def test_dtypes_and_ops(tmp_path: Path, dtype: str) -> None:
    found = bench(
        tmp_path / "run",
        *f"--ranks 2 --backend unisono,nccl --collective all_reduce -d {dtype} -o all".split(),
        *"--sizes 80K --mode events -n 6".split(),
    )
    assert not [failure for failure in found.failures if failure.backend == "unisono"]
    assert {r.case.op for r in found.results if r.backend == "unisono"} == {
        "sum",
        "prod",
        "min",
        "max",
        "avg",
    }


@needs(2)
def test_one_process_drives_all_gpus(tmp_path: Path) -> None:
    found = bench(
        tmp_path / "run",
        *("--ranks", "2", "--one-process", "--backend", "unisono,nccl,nccl-windows,torch-symm", "-d", "bf16"),
        *("--sizes", "4K,1M", "-n", "6"),
    )
    assert not found.failures
    assert {r.backend for r in found.results} == {"unisono", "nccl", "nccl-windows"}
    assert all(r.case.one_process for r in found.results)
    assert {skip.backend for skip in found.skips if skip.case is None} == {
        "torch-symm:one_shot",
        "torch-symm:two_shot",
    }


@needs(2)
def test_results_through_host_memory_are_marked(tmp_path: Path) -> None:
    found = bench(
        tmp_path / "run",
        *("--ranks", "2", "--backend", "unisono,unisono:two_shot_direct,unisono:two_shot", "-d", "bf16"),
        *("--collective", "all_reduce", "--sizes", "4K,1M", "--memory", "symmetric", "-n", "6"),
        UNISONO_PEER_ACCESS="0",
    )
    assert not found.failures
    assert {r.backend for r in found.results} == {"unisono", "unisono:two_shot"}
    assert all(r.staged and r.verification.before and r.verification.after for r in found.results)
    assert {r.algorithm for r in found.results} <= {"one_shot_packets", "two_shot_packets", "two_shot"}
    assert found.runs[0].environment["UNISONO_PEER_ACCESS"] == "0"


@needs(2)
def test_links(tmp_path: Path) -> None:
    run("links", "-O", str(tmp_path / "links"))
    found = records.read(tmp_path / "links")
    assert not found.problems
    assert found.ends
    engines = {link.engine for link in found.links}
    assert {"copy_engine", "sm_load", "sm_store", "flag"} <= engines
    assert all((link.gbps or 1) > 0.5 for link in found.links)
    assert all(0.2 < link.round_trip_us < 100 for link in found.links if link.round_trip_us is not None)


@needs(2)
def test_the_memory_limit_ends_clean(tmp_path: Path) -> None:
    found = bench(
        tmp_path / "run",
        *("--ranks", "2", "--backend", "unisono,nccl", "--collective", "all_reduce", "-d", "bf16"),
        *("--to-memory-limit", "-b", "4G"),
    )
    assert not found.failures
    assert {item.backend for item in found.largest} == {"unisono", "nccl"}
    for item in found.largest:
        assert item.used_bytes > item.total_bytes // 4
        assert "memory" in item.stopped


@needs(2)
def test_three_ranks_on_two_gpus_are_refused() -> None:
    found = run("bench", "--device", "cuda", "--ranks", str(gpus() + 1), expect=2)
    assert "needs a GPU for each rank" in found.stderr


@needs(2)
@pytest.mark.parametrize("memory", ["plain", "symmetric"])
def test_pingpong_and_all_to_all_built_of_sends(tmp_path: Path, memory: str) -> None:
    ranks = min(gpus(), 4)
    found = bench(
        tmp_path / "run",
        *("pingpong", "all_to_all", "--streams", "all", "--ranks", str(ranks), "--memory", memory),
        *("--backend", "unisono,nccl", "--sizes", "64,100K,3M", "-d", "bf16", "--mode", "all", "-n", "6"),
    )
    assert not found.failures
    assert not found.skips
    pairs = {(r.case.pattern, r.case.pair) for r in found.results if r.case.collective == "pingpong"}
    assert len(pairs) == 3 * ranks * (ranks - 1) // 2
    assert {r.case.streams for r in found.results} == {None, "one", "per-peer"}
    for result in found.results:
        assert result.verification.before and result.verification.after


@needs(2)
def test_scaling_from_one_gpu_on(tmp_path: Path) -> None:
    run(
        *("scaling", "all_reduce", "all_gather", "--weak", "--strong", "--device", "cuda", "--ranks", "1,2"),
        *("--backend", "unisono,nccl", "--sizes", "1M", "-d", "bf16", "--budget", "8"),
        *("-O", str(tmp_path / "run"), "--no-report"),
    )
    found = records.read(tmp_path / "run")
    assert not found.failures
    assert {(r.case.ranks, r.backend) for r in found.results} == {
        (ranks, backend) for ranks in (1, 2) for backend in ("unisono", "nccl")
    }


@needs(2)
def test_kernels_in_the_shape_that_is_asked_for(tmp_path: Path) -> None:
    shaped = "unisono:push_ll128@8x64x960"
    found = bench(
        tmp_path / "run",
        *("--ranks", "2", "--backend", f"unisono,{shaped}", "--collective", "all_gather"),
        *("--memory", "symmetric", "--sizes", "1M", "--mode", "graph", "-n", "6"),
    )
    assert not found.failures
    sms = {r.backend: r.sms for r in found.results}
    assert sms[shaped] == 8
    assert (sms["unisono"] or 0) > 8


@needs(2)
def test_a_table_of_algorithms_and_shapes(tmp_path: Path) -> None:
    table = tmp_path / "plan.json"
    words = ("--device", "cuda", "--ranks", "2", "--collective", "gather", "--shapes", "--budget", "15")
    run("tune", *words, "-O", str(table))
    entries = json.loads(table.read_text())["entries"]
    assert {(e["collective"], e["memory"]) for e in entries} == {("gather", "plain"), ("gather", "symmetric")}
    assert [e for e in entries if e["up_to_bytes"] is None and e["memory"] == "symmetric"]


@needs(1)
def test_mixture_of_experts_on_one_gpu(tmp_path: Path) -> None:
    found = bench(
        tmp_path / "run",
        *"--moe --ranks 1 --tokens 1,130 --hidden 264 --experts 12 --top-k 5 --mode all -n 6".split(),
    )
    assert not found.failures
    assert not found.problems
    assert {"unisono", "torch"} <= {r.backend for r in found.results} <= {"unisono", "torch", "moe-ops", "te"}
    (copy,) = [ceiling for ceiling in found.ceilings if ceiling.name == "copy"]
    assert copy.gbps > 10
    for result in found.results:
        assert result.verification.before and result.verification.after
        assert result.case.device == "cuda" and result.busbw_gbps == 0
        assert result.sol is not None and 0 < result.sol < 10
        assert (result.sms is not None) == (result.case.mode == "graph")
    modes = {r.case.mode for r in found.results if r.backend == "unisono"}
    assert modes == {"graph", "events", "throughput", "latency"}


@needs(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixture_of_experts_beside_nccl(tmp_path: Path, layout: str) -> None:
    found = bench(
        tmp_path / "run",
        *f"--moe --ranks 2 --layout {layout} --tokens 3,600 --hidden 520 --experts 16 --top-k 4".split(),
        *"--routing zipf,one_hot -n 6".split(),
    )
    assert not found.failures
    assert {"unisono", "nccl"} <= {r.backend for r in found.results} <= {"unisono", "nccl", "async-ep"}
    for backend in ("unisono", "nccl"):
        assert len([r for r in found.results if r.backend == backend]) == 3 * 2 * 2 * 2
    assert all(r.verification.before and r.verification.after for r in found.results)
    assert {skip.backend for skip in found.skips} >= {"torch", "moe-ops", "te"}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs(2))])
def test_fused_norms(tmp_path: Path, ranks: int) -> None:
    named = "unisono,nccl,unisono:apart,unisono:one_shot,unisono:two_shot_ll128"
    grid = f"--norm --ranks {ranks} --sizes 1,300K --hidden 520,1152 --mode all --backends {named} -n 6"
    found = bench(tmp_path / "run", *grid.split())
    assert not found.failures
    for backend in named.split(","):
        own = [result for result in found.results if result.backend == backend]
        assert len(own) == 2 * 2 * 2 * 4
        assert all(result.verification.before and result.verification.after for result in own)
