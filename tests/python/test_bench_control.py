"""Exchanges between ranks of which some fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench_threads import meetings
from unisono.bench.control import Control, Interrupt

RANKS = 3
Step = Callable[[Control], str | None]


def in_step(work: Step) -> list[tuple[int, str] | None]:
    """Returns the result of a step on each rank. Checks that the ranks are in step afterwards."""

    def rank(control: Control) -> tuple[int, str] | None:
        found = control.step(lambda: work(control))
        assert control.gather(control.rank, int) == list(range(RANKS))
        assert control.from_root(lambda: "said", str) == "said"
        return found

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, [Control(meeting) for meeting in meetings(RANKS)]))


def test_a_step_that_goes_well_exchanges_bytes() -> None:
    def work(control: Control) -> None:
        for _ in range(2):
            assert control.gather_bytes(bytes([control.rank])) == [b"\0", b"\1", b"\2"]

    assert in_step(work) == [None] * RANKS


@pytest.mark.parametrize("failing", range(RANKS))
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_no_rank_waits_for_one_that_failed(failing: int, after: int) -> None:
    ended: list[int] = []

    def work(control: Control) -> None:
        for number in range(3):
            if (control.rank, number) == (failing, after):
                raise OSError("no port")
            control.gather_bytes(b"")
        if (control.rank, after) == (failing, 3):
            raise OSError("no port")
        ended.append(control.rank)

    assert in_step(work) == [(failing, "OSError: no port")] * RANKS
    assert len(ended) == (RANKS - 1 if after == 3 else 0)


def test_a_returned_text_is_an_error_and_the_first_counts() -> None:
    def work(control: Control) -> str | None:
        if control.rank:
            return f"rank {control.rank} has no licence."
        control.gather_bytes(b"")
        return None

    assert in_step(work) == [(1, "rank 1 has no licence.")] * RANKS


def test_a_rank_that_exchanges_less_often_than_others_is_an_error() -> None:
    def work(control: Control) -> None:
        for _ in range(control.rank):
            control.gather_bytes(b"")

    (found, *others) = in_step(work)
    assert found is not None and "rank 0 exchanges no more: it is done" in found[1]
    assert others == [found] * (RANKS - 1)


def test_a_library_that_asks_again_after_an_error_is_not_waited_for() -> None:
    def work(control: Control) -> None:
        if control.rank == 1:
            raise OSError("no port")
        for _ in range(3):
            with pytest.raises(RuntimeError, match="rank 1 exchanges no more: OSError: no port"):
                control.gather_bytes(b"")

    assert in_step(work) == [(1, "OSError: no port")] * RANKS


@pytest.fixture
def hangups() -> Iterator[None]:
    """Gives SIGHUP its default handler, since the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_the_process_whichever_the_first_was(
    first: signal.Signals, hangups: None
) -> None:
    """After Ctrl-C, a launcher sends SIGINT, then SIGTERM."""
    all_ = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in all_]
    with Interrupt().watched() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), first)
        assert interrupt.asked
        assert [signal.getsignal(number) for number in all_] == [signal.SIG_DFL] * 3
    assert [signal.getsignal(number) for number in all_] == before


def test_under_nohup_sighup_stays_ignored(hangups: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt().watched() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
