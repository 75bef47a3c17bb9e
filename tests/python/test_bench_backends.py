"""The look-up of backends, a user's own backend in a few lines, provenance and free memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import ranks
from unisono.bench import provenance
from unisono.bench.backends import base
from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.cases import CaseError, make_case
from unisono.bench.control import Control
from unisono.bench.device import HostDevice
from unisono.cli.asked import Asked
from unisono.cli.resolve import options_of
from unisono.machine import boot
from unisono.records import Case


class Mine(Backend):
    """A backend as in the documentation."""

    name = "mine"

    def setup(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def supports(self, case: Case) -> str | None:
        return None if case.collective == "all_reduce" else "mine has all_reduce only."

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        assert buffers.x is not None
        assert buffers.out is not None
        return partial(np.copyto, buffers.out, buffers.x)


class Mock:
    """An entry point of another package."""

    name = "mine"

    def load(self) -> type[Backend]:
        return Mine


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(group: str) -> list[Any]:
        return [Mock()] if group == base.GROUP else []

    monkeypatch.setattr(base, "entry_points", points)


@pytest.mark.usefixtures("installed")
def test_a_users_backend_is_found_by_its_entry_point() -> None:
    assert base.names() == [*base.BUILT_IN, "mine"]
    backend = base.load("mine")
    assert backend.name == "mine"
    assert backend.available(2) is None
    assert backend.supports(make_case("barrier", 0, "u8", 2)) == "mine has all_reduce only."
    assert backend.algorithm(make_case("all_reduce", 8, "f32", 2)) is None
    x, out = np.ones(2, np.float32), np.zeros(2, np.float32)
    backend.prepare(make_case("all_reduce", 8, "f32", 1), Buffers(x, out))()
    assert np.array_equal(x, out)
    with pytest.raises(CaseError, match="has no variants"):
        base.load("mine:quick")


def test_unknown_backends_list_the_known() -> None:
    for look in (base.load, lambda name: base.check_names([name])):
        with pytest.raises(CaseError, match="choose from unisono, mpi, gloo"):
            look("tccl")


def test_every_built_in_backend_can_be_loaded() -> None:
    for name in base.BUILT_IN:
        assert base.load(name).name.partition(":")[0] == name


def test_another_packages_backend_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no.such.module:Backend", base.GROUP)
    monkeypatch.setattr(base, "entry_points", lambda group: [broken])
    assert base.names_for("cpu") == [name for name in base.BUILT_IN if name in base.names_for("cpu")]
    with pytest.raises(CaseError, match="'broken' cannot be loaded"):
        base.load("broken")


@pytest.mark.parametrize("reach", [True, False])
def test_every_algorithm_states_its_support(reach: bool) -> None:
    """For a direct algorithm on plain memory, the answer depends on the machine."""
    outcome = ranks.play(2, "basic_programs:supported", reach, env={} if reach else {"UNISONO_FAR": "0"})
    for wrong in outcome.results():
        assert wrong == []


def test_a_communicator_can_be_given_a_forced_algorithm() -> None:
    assert base.load("unisono:two_shot").name == "unisono:two_shot"


def test_a_communicator_can_be_asked_to_quantise() -> None:
    backend = base.load("unisono:fp8")
    assert (backend.name, backend.wire, backend.bit_exact) == ("unisono:fp8", "fp8", False)
    assert base.load("unisono").wire is None and base.load("unisono").bit_exact
    for case in (
        make_case("all_reduce", 64, "i32", 2),
        make_case("all_reduce", 64, "f32", 2, op="max"),
        make_case("reduce_scatter", 64, "f32", 2),
        make_case("barrier", 0, "u8", 2),
    ):
        assert "all_reduce only" in str(backend.supports(case))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (make_case("all_reduce", 4096, "bf16", 2), None),
        (make_case("all_reduce", 4096, "f32", 2), "sums bf16 only"),
        (make_case("all_reduce", 4096, "bf16", 2, op="max"), "sums bf16 only"),
        (make_case("reduce_scatter", 4096, "bf16", 2), "all_reduce only"),
        (make_case("all_reduce", 4100, "bf16", 2), "multiple of 16 bytes"),
        (make_case("all_reduce", 256, "bf16", 2), "512 or more"),
    ],
)
def test_flashinfer_quantises_sums_of_bf16(case: Case, why: str | None) -> None:
    backend = base.load("flashinfer")
    assert (backend.wire, backend.wire_bits) == ("fp8", 8.125)
    assert (why or "None") in str(backend.supports(case))


def test_it_is_measured_beside_quantised_calls_unless_backends_are_named() -> None:
    asked = partial(Asked, device="cuda", collectives="all_reduce", modes="graph")
    assert "flashinfer" not in options_of(asked(), []).backends
    assert "flashinfer" not in options_of(asked(wires="int8"), []).backends
    assert options_of(asked(wires="fp8"), []).backends[-2:] == ["unisono:fp8", "flashinfer"]
    assert options_of(asked(wires="fp8", backends="unisono"), []).backends == ["unisono", "unisono:fp8"]


def test_provenance_names_no_path_and_keeps_to_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["bench", "-O", "/home/someone/x", "--output=/home/someone/y", "./here", "--sizes", "8"]
    assert provenance.command(command) == [
        "unisono",
        "bench",
        "-O",
        "x",
        "--output=y",
        "here",
        "--sizes",
        "8",
    ]
    env = {
        "UNISONO_PLAN": "/home/someone/plan.json",
        "OMP_NUM_THREADS": "4",
        "MPIR_CVAR_CH4_SHM": "1",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HOSTNAME": "host",
    }
    kept = provenance.environment(env)
    assert kept == {"MPIR_CVAR_CH4_SHM": "1", "OMP_NUM_THREADS": "4", "UNISONO_PLAN": "set"}
    machine = provenance.machine()
    assert machine.cores >= 1
    assert provenance.machine(64).cores == 64
    assert machine.memory_bytes > 0
    assert provenance.libraries({"mpi": "MPICH 5"})["backend mpi"] == "MPICH 5"


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/", {}, 1000),
        ("0::/", {"memory.max": "max", "memory.current": "10"}, 1000),
        ("0::/", {"memory.max": "900", "memory.current": "500"}, 400),
        ("0::/", {"memory.max": "900", "memory.current": "500", "memory.stat": "inactive_file 50"}, 450),
        ("0::/a/b", {"a/memory.max": "700", "a/memory.current": "100", "a/b/memory.max": "max"}, 600),
        ("0::/not/to/be/seen", {"memory.max": "300", "memory.current": "400"}, 0),
        (
            "3:cpu:/\n2:memory:/a\n0::/",
            {
                "memory/a/memory.limit_in_bytes": "800",
                "memory/a/memory.usage_in_bytes": "500",
                "memory/a/memory.stat": "inactive_file 10\ntotal_inactive_file 20",
            },
            320,
        ),
    ],
)
def test_free_memory_is_that_of_the_container(
    groups: str, files: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "memory_bytes", lambda field: {"MemAvailable": 1000}[field])
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (written | {"proc/self/cgroup": groups}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert provenance.free_bytes(tmp_path) == free


def test_room_is_the_share_of_a_rank_on_the_fullest_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Three:
        """Rank 0 of three, the last of which is alone on a machine with less memory."""

        rank, size = 0, 3

        def __init__(self, others: int) -> None:
            self._answers = iter(([boot(), "another"], [350_000, others]))

        def all_gather(self, data: bytes) -> list[bytes]:
            return [data, *map(msgspec.msgpack.encode, next(self._answers))]

    monkeypatch.setattr(provenance, "free_bytes", lambda: 1_000_000)
    host = HostDevice(lambda: None)
    assert host.room(Control(Three(100_000)), own=0) == 25_000
    assert host.room(Control(Three(900_000)), own=1) == 350_000 // 6


def test_ways_over_the_fabric_measure_the_memory_that_they_name() -> None:
    symmetric, plain = (
        make_case("all_to_all", 1 << 20, "f32", 4, memory=where) for where in ("symmetric", "plain")
    )
    for way, memory in (("multi", "host"), ("multi-pin", "pinned"), ("single-dma", "device")):
        backend = base.load(f"fabric:{way}")
        assert backend.memory == memory
        assert backend.supports(symmetric) is None
        assert (backend.supports(plain) is None) == (memory == "host")
    other = make_case("all_gather", 1 << 20, "f32", 4, memory="symmetric")
    assert base.load("fabric:multi-pin").supports(other) is None
    assert "no all_gather of GPU memory" in str(base.load("fabric:multi-dma").supports(other))
