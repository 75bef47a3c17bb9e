"""The bench on GPUs as far as it can be tested without one: options and refusals, cases, NCCL's types,
provenance."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from unisono import nccl, records, traits
from unisono.bench import cases, options, provenance, start, workloads
from unisono.bench.backends import base
from unisono.bench.backends import nccl as nccl_backend
from unisono.bench.backends.torch_symm import TorchSymmBackend
from unisono.bench.buffers import Pools, plain_region
from unisono.bench.cuda import device, staging
from unisono.bench.cuda.memory import TensorRegion
from unisono.cli.app import app
from unisono.cli.asked import Asked
from unisono.cli.resolve import options_of
from unisono.records import vocabulary

needs_no_gpu = pytest.mark.skipif(device.missing() is None, reason="this machine has a GPU")


# ---- cases and options


def test_old_records_are_still_read(tmp_path: Path) -> None:
    """A case of schema 1.0 has no device, and counts as one of the CPU."""
    new = cases.make_case("all_reduce", 64, "f32", 2)
    old = json.loads(msgspec.json.encode(new))
    del old["device"]
    assert msgspec.json.decode(json.dumps(old), type=records.Case) == new
    assert records.SCHEMA_VERSION.startswith("1.")
    assert not records.read(Path(__file__).parents[2] / "results" / "cpu-2-cores").problems


def test_the_calls_of_a_queue_last_about_a_millisecond() -> None:
    def queue(size: int, mode: str) -> int:
        case = cases.make_case("all_reduce", size, "bf16", 8, mode=mode, device="cuda")
        return cases.calls_per_sample(case)

    counts = [queue(1 << power, "graph") for power in range(10, 33)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == cases.MOST_CALLS
    assert counts[-1] == cases.FEWEST_CALLS
    assert 10 <= queue(16 << 20, "graph") <= 20
    assert queue(16 << 20, "throughput") == queue(16 << 20, "graph")
    assert queue(1 << 10, "events") == queue(1 << 10, "latency") == 1


def test_the_modes_of_a_device_are_not_those_of_another() -> None:
    with pytest.raises(cases.CaseError, match="choose from latency, throughput"):
        cases.make_case("all_reduce", 64, "f32", 2, mode="graph")
    assert cases.make_case("all_reduce", 64, "f32", 2, mode="graph", device="cuda").mode == "graph"
    with pytest.raises(cases.CaseError, match="unknown device 'gpu': choose from cpu, cuda"):
        cases.make_case("all_reduce", 64, "f32", 2, device="gpu")


def test_the_presets_of_gpus() -> None:
    found = options_of(Asked(preset="standard", device="cuda"), [])
    assert found.sizes == [1 << power for power in range(10, 31, 2)]
    assert (found.modes, found.device, found.dtypes) == (["graph", "events"], "cuda", ["bf16"])
    assert found.backends == ["unisono", "nccl", "nccl-windows", "torch-symm:one_shot", "torch-symm:two_shot"]
    assert options.CUDA_PRESETS.keys() == options.PRESETS.keys()
    assert options_of(Asked(), []).backends == ["unisono", "mpi", "gloo"]
    assert "mpi" in options_of(Asked(device="cuda", backends="all", modes="latency"), []).backends
    assert found.limits.budget_s < 540
    restored = options.Options.unpack(found.pack())
    assert restored == found


def test_the_memory_limit_begins_at_a_gibibyte() -> None:
    found = options_of(Asked(device="cuda", to_memory_limit=True), [])
    assert (found.to_memory_limit, found.sizes, found.memories) == (True, [1 << 30], ["plain"])
    assert options_of(Asked(device="cuda", to_memory_limit=True, begin="1M"), []).sizes == [1 << 20]
    one = Asked(device="cuda", to_memory_limit=True, sizes="4M", workloads="none", memories="symmetric")
    assert (options_of(one, []).sizes, options_of(one, []).memories) == ([4 << 20], ["symmetric"])


def test_one_process_has_backends_whose_ranks_may_be_threads() -> None:
    assert options_of(Asked(device="cuda", one_process=True), []).threads == 1
    able = {name: base.load(name).threads for name in base.names()}
    assert {name for name, threads in able.items() if threads} == {"unisono", "nccl", "nccl-windows"}


def test_workloads_are_measured_as_graphs() -> None:
    (_, wanted), *_ = workloads.select(["llama-3-70b-tp-decode"], 8, "cuda")
    assert {(case.device, case.mode) for case in wanted} == {("cuda", "graph")}


# ---- refusals


@needs_no_gpu
@pytest.mark.parametrize(
    "arguments", [["bench", "--device", "cuda"], ["bench", "--device", "cuda", "--ranks", "2"], ["links"]]
)
def test_without_a_gpu_the_error_names_what_is_missing(arguments: list[str]) -> None:
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert "torch" in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


@needs_no_gpu
@pytest.mark.parametrize("name", ["nccl", "nccl-windows", "torch-symm"])
def test_backends_for_gpus_say_why_they_are_not_usable(name: str) -> None:
    reason = base.load(name).available(2)
    assert reason is not None
    assert reason.endswith(".")
    assert "torch" in reason


def test_wrong_words_for_gpus_are_refused() -> None:
    for arguments, says in (
        (["--device", "gpu"], "unknown device 'gpu': choose from cpu, cuda"),
        (["--mode", "graph"], "unknown mode 'graph': choose from latency, throughput"),
        (["--to-memory-limit"], "add --device cuda"),
        (["--one-process"], "add --device cuda"),
        (["--device", "cuda", "--one-process", "--mode", "latency"], "choose --mode graph, events or both"),
        (["--device", "cuda", "--backend", "torch-symm:three_shot"], "choose from one_shot, two_shot"),
    ):
        found = CliRunner().invoke(app, ["bench", *arguments])
        assert found.exit_code == 2
        assert says in found.stderr


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "missing", lambda: None)
    monkeypatch.setattr(start, "count", lambda: 2)
    with pytest.raises(cases.CaseError, match="needs a GPU for each rank, and 2 can be seen"):
        start.ranks_to_start(3, "cuda", 8)
    assert start.ranks_to_start(None, "cuda", 8) == 2
    assert start.ranks_to_start(None, "cpu", 3) == 3


def test_multicast_is_off_unless_the_user_says_otherwise() -> None:
    env = {"NCCL_NVLS_ENABLE": "1"}
    device.prepare_environment(env)
    assert env["NCCL_NVLS_ENABLE"] == "1"
    assert env["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == env["NVSHMEM_DISABLE_NVLS"] == "1"
    assert set(device.ENVIRONMENT) <= set(provenance.environment(env))


# ---- backends


def test_the_cases_of_torch_symm() -> None:
    def case(**changes: Any) -> records.Case:
        made = cases.make_case(
            "all_reduce", 1 << 20, "bf16", 8, memory="symmetric", mode="graph", device="cuda"
        )
        return msgspec.structs.replace(made, **changes)

    one, two = TorchSymmBackend("one_shot"), TorchSymmBackend("two_shot")
    assert one.supports(case()) is None
    assert two.supports(case(placement="in_place")) is None
    for other, words in (
        (case(collective="all_gather"), "all_reduce only"),
        (case(op="max"), "sum of bf16 and f32"),
        (case(dtype="f16"), "sum of bf16 and f32"),
        (case(memory="plain"), "symmetric memory"),
        (case(bytes=1000), "multiple of 16"),
        (case(placement="in_place"), "no in-place"),
        (case(bytes=1 << 30), "is measured to"),
    ):
        assert words in str(one.supports(other))


@pytest.mark.parametrize("named", [None, "lo"])
def test_torch_symm_leaves_the_environment_as_the_user_set_it(
    named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if named is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    backend = TorchSymmBackend()
    backend.setup(base.Ranks(0, 1, lambda data: [data], None))
    backend.close()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == named


def test_the_cases_of_nccl() -> None:
    plain, windows = base.load("nccl"), base.load("nccl-windows")
    case = cases.make_case("all_to_all", 1 << 20, "f8e4m3", 8, mode="graph", device="cuda")
    assert plain.supports(case) is None
    assert "in-place" in str(plain.supports(msgspec.structs.replace(case, placement="in_place")))
    assert "plain cases" in str(windows.supports(case))
    assert windows.supports(msgspec.structs.replace(case, memory="symmetric")) is None
    assert windows.own_memory
    assert not plain.own_memory


def test_the_types_of_nccl() -> None:
    """Sizes, and the codes of every dtype and op of the bench, are those of nccl.h."""
    assert ctypes.sizeof(nccl.UniqueId) == 128
    assert nccl.DTYPES.keys() == vocabulary.DTYPES.keys()
    assert set(nccl.OPS) == {op for op in vocabulary.OPS if traits.has_op("i32", op, on_gpu=True)}
    assert nccl.DTYPES["bf16"] == 9
    assert nccl.OPS == {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
    for name, types in (nccl.REQUIRED | nccl.NEWER).items():
        if name.startswith("ncclAll") or name in ("ncclSend", "ncclRecv", "ncclGather", "ncclScatter"):
            assert types[-2:] == [ctypes.c_void_p, ctypes.c_void_p]  # communicator, stream
    assert nccl.version_text(22809) == "2.28.9"
    assert nccl.candidates()[0] == "libnccl.so.2"


def test_a_name_can_stand_for_its_variants() -> None:
    assert base.expanded(["torch-symm", "nccl"]) == ["torch-symm:one_shot", "torch-symm:two_shot", "nccl"]
    assert base.expanded(["torch-symm:two_shot"]) == ["torch-symm:two_shot"]
    assert set(base.names_for("cuda")) >= {"unisono", "nccl", "nccl-windows", "torch-symm"}
    assert "gloo" not in base.names_for("cuda")


@pytest.mark.torch
@pytest.mark.parametrize("placement", vocabulary.PLACEMENTS)
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "scatter"])
def test_staged_calls_copy_in_and_out(collective: str, placement: str) -> None:
    import torch

    case = cases.make_case(
        collective, 960, "bf16", 3, placement=placement, memory="symmetric", mode="latency", device="cuda"
    )

    def region(size: int) -> TensorRegion:
        return TensorRegion(torch.zeros(size, dtype=torch.uint8))

    placed = Pools([msgspec.structs.replace(case, memory="plain")], 0, region).place(
        msgspec.structs.replace(case, memory="plain")
    )
    seen: list[Any] = []

    def bind(what: records.Case, host: base.Buffers) -> Callable[[], object]:
        seen.append(host)
        assert host.x.shape == tuple(placed.buffers.x.shape)
        if placement == "in_place":
            assert np.shares_memory(host.x, host.out)

        def call() -> None:
            host.out.reshape(-1)[:] = host.x.reshape(-1)[0]

        return call

    call = staging.staged(case, 0, placed.buffers, bind, plain_region)
    placed.buffers.x.fill_(3)
    call()
    assert bool((placed.buffers.out == 3).all())


@pytest.mark.parametrize("placement", vocabulary.PLACEMENTS)
@pytest.mark.parametrize("collective", ["gather", "scatter", "reduce", "broadcast"])
def test_every_rank_knows_the_place_of_the_roots_buffers(collective: str, placement: str) -> None:
    case = cases.make_case(collective, 960, "f32", 3, placement=placement)
    pools = [Pools([case], rank) for rank in range(3)]
    root, *others = [pool.place(case).buffers for pool in pools]
    assert root.x_place is root.x
    assert root.out_place is root.out
    for other in others:
        assert other.x_place is not None
        if other.x is None:
            assert other.x_place.shape == root.x.shape
        if other.out is None:
            assert other.out_place.shape == root.out.shape
        if placement == "in_place" and collective == "reduce":
            assert other.out_place is other.x


def test_nccl_registers_no_window_before_all_ranks_have_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class Library:
        def allocate(self, size: int) -> int:
            log.append("allocate")
            return 4096 * len(log)

    class Comm:
        def register(self, address: int, size: int) -> None:
            log.append(address)

    def all_gather(data: bytes) -> list[bytes]:
        log.append("all_gather")
        return [data]

    monkeypatch.setattr(nccl_backend, "tensor_at", lambda address, *_: address)
    backend = nccl_backend.NcclWindowsBackend()
    backend._library, backend._comms = Library(), {"ring": Comm(), "pairs": Comm()}  # type: ignore[dict-item]
    backend._ranks = base.Ranks(0, 1, all_gather, None)
    assert backend.allocate(64) == (4096, 8192)
    assert log == ["allocate", "allocate", "all_gather", 4096, 4096, 8192, 8192]
