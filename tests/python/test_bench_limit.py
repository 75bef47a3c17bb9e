"""The search for the largest size, with torch tensors in host memory; the same code runs on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from bench_threads import options, run_session  # noqa: E402
from unisono import records  # noqa: E402
from unisono.bench import limit, session  # noqa: E402
from unisono.bench.backends.unisono import UnisonoBackend  # noqa: E402
from unisono.bench.buffers import Pools  # noqa: E402
from unisono.bench.cases import make_case  # noqa: E402
from unisono.bench.control import Control, Interrupt  # noqa: E402
from unisono.bench.cuda import verify  # noqa: E402
from unisono.bench.cuda.memory import TensorRegion  # noqa: E402
from unisono.bench.device import HangError, HostDevice  # noqa: E402
from unisono.records import Case  # noqa: E402

pytestmark = pytest.mark.torch
RANKS, ROOM, SLACK = 2, 1_900_000, 4096  # bytes of a buffer, and bytes for its alignment


class SmallDevice(HostDevice):
    """Torch tensors in host memory. One buffer may have ROOM bytes."""

    arithmetic = verify.arithmetic("cpu")

    def pools(self, cases: Iterable[Case], rank: int) -> Pools:
        def region(size: int) -> TensorRegion:
            if size > ROOM + SLACK:
                raise MemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
            return TensorRegion(torch.empty(size, dtype=torch.uint8))

        return Pools(cases, rank, region)

    def used_bytes(self) -> tuple[int, int]:
        return 3 << 20, 4 << 20


class Broken(UnisonoBackend):
    """Wrong from 256 KiB on."""

    def prepare(self, case: Case, buffers: Any) -> Callable[[], object]:
        call = super().prepare(case, buffers)

        def wrong() -> None:
            call()
            if case.bytes >= 256 << 10:
                buffers.out.reshape(-1)[0] = 77

        return wrong


class Small(UnisonoBackend):
    """Supports no messages above 128 KiB."""

    def supports(self, case: Case) -> str | None:
        return "it has at most 128 KiB." if case.bytes > 128 << 10 else None


def run(directory: Path, collectives: list[str]) -> records.Records:
    chosen = options(
        directory,
        ["unisono"],
        collectives=collectives,
        sizes=[64 << 10],
        memories=["plain"],
        to_memory_limit=True,
    )

    def session_of(control: Control, align: Any, measured: Any) -> session.Session:
        device = SmallDevice(align.barrier)
        return session.Session(chosen, control, measured, Interrupt(), "threads", device)

    found, _ = run_session(chosen, RANKS, session_of)
    return found


def test_each_collective_grows_until_the_memory_is_full(tmp_path: Path) -> None:
    found = run(tmp_path / "run", ["all_reduce", "all_gather", "barrier", "all_to_all_v"])
    assert not found.failures
    assert not found.problems
    by_name = {item.case.collective: item for item in found.largest}
    assert by_name.keys() == {"all_reduce", "all_gather", "all_to_all_v"}
    for item in found.largest:
        assert item.case.bytes * (1 + limit.WITHIN) >= ROOM and item.case.bytes <= ROOM + SLACK
        assert item.time_us > 0
        assert (item.used_bytes, item.total_bytes) == (3 << 20, 4 << 20)
        assert "out of memory" in item.stopped
    assert found.ends[0].interrupted is False


@pytest.mark.parametrize("room", [8, 100, 1 << 20, (1 << 20) + 7, 1_500_000, (2 << 20) - 1])
def test_the_largest_size_that_fits_is_found_to_within_the_share(room: int) -> None:
    ran, full, steps = make_case("all_gather", 8, "f32", 2), None, 0
    while (case := limit._following(ran, full)) is not None:
        assert case.bytes % 8 == 0  # whole elements of two ranks
        assert case.bytes > ran.bytes and (full is None or case.bytes < full.bytes)
        ran, full = (case, full) if case.bytes <= room else (ran, case)
        steps += 1
    assert full is not None
    assert ran.bytes <= room < full.bytes
    assert full.bytes - ran.bytes <= max(8, limit.WITHIN * ran.bytes)
    assert steps <= 18 + 1 + 6  # doublings to 2 MiB, one that does not fit, and halvings: 2 ** -6 < 0.02


def test_a_wrong_result_is_a_failure_and_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load", lambda name: Broken())
    found = run(tmp_path / "run", ["broadcast"])
    (failure,) = found.failures
    assert "element 0 is 77" in failure.message
    assert failure.case.bytes == 256 << 10
    assert found.largest[0].case.bytes == 128 << 10


def test_a_backend_is_asked_whether_it_supports_each_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "load", lambda name: Small())
    found = run(tmp_path / "run", ["broadcast"])
    (largest,) = found.largest
    assert (largest.case.bytes, largest.stopped) == (128 << 10, "it has at most 128 KiB.")
    assert not found.failures and not found.skips


@pytest.mark.parametrize("error", [None, HangError("gone")], ids=["ctrl-c", "hang"])
def test_the_largest_size_is_recorded_however_the_search_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: HangError | None
) -> None:
    step = limit.Sweep._step

    def ending(self: limit.Sweep, backend: Any, case: Case, seed: int) -> limit.Step:
        if case.bytes == 256 << 10:
            self._interrupt.asked = True
            if error is not None:
                raise error
        return step(self, backend, case, seed)

    monkeypatch.setattr(limit.Sweep, "_step", ending)
    with pytest.raises(HangError) if error else nullcontext():
        run(tmp_path / "run", ["broadcast"])
    (largest,) = records.read(tmp_path / "run").largest
    assert largest.case.bytes == (128 if error else 256) << 10
    assert largest.stopped == f"the run ended before {256 if error else 512} KiB had run."


def test_errors_that_mean_full_memory() -> None:
    assert limit.is_full("OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB.")
    assert limit.is_full("ResourceError: 64 GiB of GPU memory: out of memory")
    assert not limit.is_full("ncclAllReduce failed: unhandled cuda error")
