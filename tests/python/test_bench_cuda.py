"""The bench on GPUs as far as it can be tested without one: options and refusals, cases, the loops on a
stand-in device, NCCL's types, provenance."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from unisono import nccl
from unisono.bench import cases, options, provenance, records, request, start, workloads
from unisono.bench.backends import base
from unisono.bench.backends import nccl as nccl_backend
from unisono.bench.backends.torch_symm import TorchSymmBackend
from unisono.bench.buffers import Pools, plain_region
from unisono.bench.cuda import device, links, staging, timing
from unisono.bench.cuda.memory import TensorRegion
from unisono.bench.device import HangError
from unisono.bench.request import Asked, options_of
from unisono.cli import app

needs_no_gpu = pytest.mark.skipif(device.missing() is None, reason="this machine has a GPU")


# ---- cases and options


def test_old_records_are_still_read(tmp_path: Path) -> None:
    """A case of schema 1.0 has no device: it is the CPU's."""
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
    assert options_of(Asked(device="cuda", to_memory_limit=True, begin="1M", end="1M"), []).sizes == [1 << 20]


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
def test_without_a_gpu_it_says_what_is_missing(arguments: list[str]) -> None:
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


def test_what_torch_symm_has() -> None:
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


def test_what_nccl_has() -> None:
    plain, windows = base.load("nccl"), base.load("nccl-windows")
    case = cases.make_case("all_to_all", 1 << 20, "f8e4m3", 8, mode="graph", device="cuda")
    assert plain.supports(case) is None
    assert "in-place" in str(plain.supports(msgspec.structs.replace(case, placement="in_place")))
    assert "plain cases" in str(windows.supports(case))
    assert windows.supports(msgspec.structs.replace(case, memory="symmetric")) is None
    assert windows.own_memory
    assert not plain.own_memory


def test_the_types_of_nccl() -> None:
    """As in nccl.h: sizes, and every dtype and op of the bench."""
    assert ctypes.sizeof(nccl.UniqueId) == 128
    assert nccl.DTYPES.keys() == cases.DTYPES.keys()
    assert set(nccl.OPS) == set(cases.OPS)
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
@pytest.mark.parametrize("placement", cases.PLACEMENTS)
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


@pytest.mark.parametrize("placement", cases.PLACEMENTS)
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


# ---- loops


class Line:
    """A start line that counts."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def arm(self) -> None:
        self.log.append("arm")

    def release(self) -> None:
        self.log.append("release")

    def pass_by(self) -> None:
        self.log.append("pass")


class Event:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("record")


class StandIn:
    """The part of a device that the loops see; `wait_fails_at`: the number of the wait that hangs."""

    stream = 0

    def __init__(self, wait_fails_at: int = -1) -> None:
        self.log: list[str] = []
        self.line: Any = Line(self.log)
        self.runtime: Any = None
        self._waits, self._fails_at = 0, wait_fails_at

    def align(self) -> None:
        self.log.append("align")

    def agree(self, error: str | None) -> None:
        if error is not None:
            raise RuntimeError(error)

    def wait(self, step: str) -> None:
        self._waits += 1
        self.log.append("wait")
        if self._waits == self._fails_at:
            raise HangError("the GPU is gone")

    def new_event(self) -> Any:
        return Event(self.log)

    def elapsed_ns(self, first: Any, last: Any) -> float:
        return 2000.0


def calling(log: list[str], fail_at: int = -1) -> Callable[[], None]:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        log.append("call")
        if count == fail_at:
            raise OSError("no route")

    return call


def test_events_lie_around_the_call_behind_the_start_line() -> None:
    gpu = StandIn()
    runner = timing.CudaRunner(gpu, "events", calling(gpu.log), 1, lambda: None)
    found = runner.timed(3, 1, 2)
    assert gpu.log[:3] == ["call", "call", "wait"]
    assert gpu.log[3:] == ["arm", "record", "call", "record", "release", "wait"] * 3
    assert found.durations.tolist() == [2000] * 3
    assert len(found.starts) == 0


def test_a_queue_is_timed_by_the_host_clock() -> None:
    gpu = StandIn()
    found = timing.CudaRunner(gpu, "throughput", calling(gpu.log), 4, lambda: None).timed(2, 4, 0)
    assert gpu.log == ["wait", *(["align", *["call"] * 4, "wait"] * 2)]
    assert np.all(found.durations > 0)


@pytest.mark.parametrize("mode", ["events", "latency"])
@pytest.mark.parametrize("fail_at", [1, 2, 3, 5])
def test_after_an_error_every_alignment_is_still_made(mode: str, fail_at: int) -> None:
    gpu = StandIn()
    found = timing.CudaRunner(gpu, mode, calling(gpu.log, fail_at), 1, lambda: None).timed(4, 1, 1)
    assert found.error == "OSError: no route"
    assert not found.hung
    assert sum(gpu.log.count(word) for word in ("release", "pass", "align")) == 4


def test_what_the_alignment_raises_is_told_with_what_the_call_raised_before() -> None:
    gpu = StandIn()
    gpu.align = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    runner = timing.CudaRunner(gpu, "latency", calling(gpu.log, 1), 1, lambda: None)
    with pytest.raises(RuntimeError, match="OSError: no route; then division by zero"):
        runner.timed(4, 1, 1)


def test_a_watch_saves_before_it_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    ended = threading.Event()

    def leave(code: int) -> None:
        done.append(f"exit {code}")
        watch.stop()
        ended.set()

    def save() -> None:
        done.append("save")
        raise OSError("the disk is full")

    monkeypatch.setattr(device, "SILENCE_S", 0.0)
    monkeypatch.setattr(device.os, "_exit", leave)
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    watch = device.Watch(0)
    watch.save = save
    assert ended.wait(30)
    assert done == ["save", "exit 1"]


def test_a_hang_is_told_from_an_error() -> None:
    gpu = StandIn(wait_fails_at=3)
    found = timing.CudaRunner(gpu, "events", calling(gpu.log), 1, lambda: None).timed(5, 1, 1)
    assert found.hung
    assert found.error == "the GPU is gone"
    assert gpu.log.count("release") + gpu.log.count("pass") == 5


def test_a_failure_that_the_library_tells_later_is_the_cells() -> None:
    def failed() -> None:
        if "record" in gpu.log:
            raise RuntimeError("rank 1 is late")

    gpu = StandIn()
    found = timing.CudaRunner(gpu, "events", calling(gpu.log), 1, failed).timed(2, 1, 1)
    assert found.error == "RuntimeError: rank 1 is late"


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


# ---- links


def test_the_transfers_of_a_pattern() -> None:
    bench = links.Links.__new__(links.Links)
    bench.devices, bench.size = [0, 1, 2, 3], 3 * links.UNIT
    assert bench.transfers("pair", (2, 0)) == [(2, 0, bench.size)]
    assert bench.transfers("ring") == [
        (0, 1, bench.size),
        (1, 2, bench.size),
        (2, 3, bench.size),
        (3, 0, bench.size),
    ]
    every = bench.transfers("all_pairs")
    assert len(every) == 12
    assert {move[2] for move in every} == {links.UNIT}
    for first in range(0, 12, 4):  # at any moment each GPU receives from one
        assert len({move[1] for move in every[first : first + 4]}) == 4


def test_the_ceiling_is_the_fastest_ring() -> None:
    def ring(engine: str, gbps: float) -> records.Link:
        return records.Link(
            engine=engine,
            pattern="ring",
            devices=2,
            bytes=1 << 20,
            gbps=gbps,
            samples=[gbps - 1, gbps, gbps + 1],
        )

    best = links.ceiling_of([ring("sm_store", 360.0), ring("copy_engine", 390.0), ring("sm_load", 335.0)])
    assert best is not None
    assert (best.name, best.gbps, best.samples_gbps) == ("ring", 390.0, [389.0, 390.0, 391.0])
    assert links.ceiling_of([]) is None


@pytest.mark.parametrize(("oldest", "bulk"), [((9, 0), True), ((8, 0), False)])
def test_bulk_copies_are_measured_where_every_gpu_has_them(oldest: tuple[int, int], bulk: bool) -> None:
    bench = links.Links.__new__(links.Links)
    capability = [(10, 0), oldest].__getitem__
    bench._torch = SimpleNamespace(cuda=SimpleNamespace(get_device_capability=capability))
    bench.devices, bench._kernels = [0, 1], object()
    assert (links.BULK_STORE in bench.engines) is bulk
    assert bench.engines[:3] == (links.COPY_ENGINE, links.SM_LOAD, links.SM_STORE)


def test_rings_count_also_where_a_later_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = records.Link(engine="sm_store", pattern="ring", devices=2, bytes=8, gbps=360.0, samples=[360.0])
    line = msgspec.json.encode(ring).decode()
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\necho '{line}'\nprintf '{{\"engine\"'\nexit 1\n")
    child.chmod(0o755)
    monkeypatch.setattr(links.sys, "executable", str(child))
    measured, ceiling = links.elsewhere(2)
    assert measured == ring
    assert isinstance(ceiling, records.Ceiling) and ceiling.gbps == 360.0


def test_a_directory_for_links_has_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert request.directory_of(None, "links").name.startswith("unisono-links-")
    assert os.listdir(tmp_path) == []
