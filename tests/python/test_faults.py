"""Ranks that die, stay away, stop, leave, fork or are interrupted: the others soon report it, and nothing is
left."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

import fabric
import ranks
from faults import NOTICED_S, assert_lost, assert_nothing_left, error_of


def programs(name: str) -> str:
    return f"fault_programs:{name}"


@pytest.fixture(params=["host", *(pytest.param(one, marks=pytest.mark.fabric) for one in ("shm", "tcp"))])
def lane(request: pytest.FixtureRequest) -> dict[str, str]:
    """Returns the environment of ranks on the host lane, or over a provider of the fabric lane."""
    if request.param != "host" and (reason := fabric.missing(request.param)):
        pytest.skip(reason)
    return {} if request.param == "host" else fabric.over(request.param)


@pytest.mark.parametrize(
    ("what", "memory", "check", "victim"),
    [
        ("barrier", "plain", False, 1),
        ("all_reduce small", "plain", False, 0),
        ("all_reduce large", "plain", True, 1),
        ("all_reduce large", "symmetric", False, 0),
        ("all_reduce staged", "plain", False, 1),
        ("all_gather", "plain", False, 0),
        ("all_to_all_v", "plain", False, 1),
        ("empty", "plain", False, 0),
    ],
)
def test_kill_inside_a_call(what: str, memory: str, check: bool, victim: int) -> None:
    marker = ranks.new_marker()
    outcome = ranks.play(3, programs("killed_inside"), what, memory, check, victim, env=marker)
    assert outcome.ranks[victim] is None
    assert_lost(outcome, victim)
    assert outcome.ended.code == 128 + 9
    assert f"rank {victim} was killed by SIGKILL" in outcome.ended.output
    assert_nothing_left(outcome, marker["UNISONO_TEST"])


@pytest.mark.parametrize(("n", "seconds", "far"), [(2, 0.31, "1"), (4, 0.47, "1"), (3, 0.23, "0")])
def test_kill_anywhere_in_traffic(n: int, seconds: float, far: str) -> None:
    marker = ranks.new_marker()
    env = {**marker, "UNISONO_FAR": far, "UNISONO_CHECK": "0"}
    outcome = ranks.play(n, programs("killed_in_traffic"), seconds, env=env)
    assert_lost(outcome, victim=n - 1)
    assert_nothing_left(outcome, marker["UNISONO_TEST"])


@pytest.mark.parametrize("what", ["barrier", "all_reduce large", "all_to_all", "empty"])
def test_rank_that_never_comes(what: str) -> None:
    outcome = ranks.play(3, programs("never_comes"), what)
    answer = outcome.results()
    texts = set()
    for one in answer:
        error = error_of(one["first"])
        assert error["type"] == "TimeoutError"
        assert "UnisonoError" in error["bases"] and "OSError" in error["bases"]
        assert error_of(one["again"][0]) == error
        assert one["waited"] < NOTICED_S
        texts.add(error["text"])
    text = texts.pop()
    assert not texts, "the ranks tell different stories"
    assert what.partition(" ")[0] in text
    for word in ("of rank ", "has waited 1 s for rank 2", "slot ", "epoch expected ", "seen "):
        assert word in text
    assert outcome.ended.code == 0


def test_rank_that_is_stopped() -> None:
    for rank, one in enumerate(ranks.play(3, programs("stopped")).results()):
        assert error_of(one["first"])["type"] == "TimeoutError", rank
        assert error_of(one["again"][0]) == error_of(one["first"])


@pytest.mark.parametrize("victim", [1, 2])
def test_only_the_rank_that_is_stopped_is_blamed(victim: int) -> None:
    """Also if the first rank to give up has waited for a rank that itself waits for the stopped one."""
    rounds = 6
    for answer in ranks.play(3, programs("stopped_in_traffic"), rounds, victim).results():
        errors = [error_of(one) for one in answer]
        assert [error["type"] for error in errors] == ["TimeoutError"] * rounds
        for error in errors:
            assert f"has waited 0.5 s for rank {victim} (slot " in error["text"], error["text"]


@pytest.mark.parametrize("how", ["close", "del", "exit", "raise", "_exit"])
def test_rank_that_leaves_early(how: str, lane: dict[str, str]) -> None:
    outcome = ranks.play(2, programs("leaves_early"), how, env=lane)
    assert outcome.ranks[0] is not None, str(outcome.ended)
    answer = outcome.ranks[0]["result"]
    error = error_of(answer["first"])
    assert error["type"] == "PeerLostError"
    assert "rank 1 (process " in error["text"] and "all_reduce" in error["text"]
    assert ("has died" if how == "_exit" else "has closed its communicator") in error["text"]
    assert error_of(answer["again"][0]) == error


def test_rank_may_leave_after_its_part() -> None:
    answer = ranks.play(2, programs("leaves_after_its_part")).results()[0]
    assert "error" not in answer["first"]
    assert answer["sum"] == sum(range(100))


def test_fork(lane: dict[str, str]) -> None:
    """A child of a rank is no rank. Its calls are refused, and its end is not the rank's."""
    outcome = ranks.play(2, programs("forked"), env=lane)
    for rank, answer in enumerate(outcome.results()):
        assert "error" not in answer["again"], f"rank {rank}: {answer['again']}"
        assert answer["sum"] == 8
    child = outcome.results()[0]["child"]
    refused = error_of(child["call"])
    assert refused["type"] == "UsageError" and "forked" in refused["text"]
    assert "error" not in child["looked"]
    assert child["kept"] == 1 << 18


def test_out_of_memory_within_a_call() -> None:
    """The communicator closes, since the ranks are out of step."""
    answer = ranks.play(1, programs("out_of_memory_within_a_call")).results()[0]
    assert error_of(answer["first"])["type"] == "MemoryError"
    assert answer["closed"]
    assert error_of(answer["again"])["type"] == "UsageError"
    peer = error_of(answer["peer"])
    assert peer["type"] == "PeerLostError" and "rank 0 " in peer["text"]


def test_keyboard_interrupt_ends_a_wait(lane: dict[str, str]) -> None:
    zero, one = ranks.play(2, programs("interrupted"), env=lane).results()
    assert error_of(zero["first"])["type"] == "KeyboardInterrupt"
    assert zero["first"]["at"] - one["sent"] < NOTICED_S
    assert zero["closed"]
    assert error_of(zero["again"][0])["type"] == "UsageError"
    assert error_of(one["first"])["type"] == "PeerLostError"
    assert "rank 0" in error_of(one["first"])["text"]


def test_closed_by_another_thread(lane: dict[str, str]) -> None:
    zero, one = ranks.play(2, programs("closed_by_another_thread"), env=lane).results()
    assert "was closed by another thread" in error_of(zero["first"])["text"]
    assert "has closed its communicator" in error_of(one["first"])["text"]


def test_error_of_a_signal_handler_ends_a_wait() -> None:
    zero, one = ranks.play(2, programs("handler_raises")).results()
    assert error_of(zero["first"])["type"] == "RuntimeError"
    assert error_of(zero["first"])["text"] == "the handler gives up"
    assert zero["closed"]
    assert error_of(one["first"])["type"] == "PeerLostError"


def test_handled_signal_does_not_end_a_wait() -> None:
    assert ranks.play(2, programs("handler_returns")).results() == [2, 2]


def test_time_that_a_rank_was_stopped_is_not_waited() -> None:
    assert ranks.play(2, programs("stopped_past_the_deadline")).results() == [2, 2]


def test_deadline_while_another_thread_keeps_the_gil() -> None:
    answer = ranks.play(1, programs("without_the_gil")).results()[0]
    assert error_of(answer["first"])["type"] == "TimeoutError"
    assert answer["waited"] < 3.5


def test_exit_with_a_thread_in_a_call() -> None:
    """Nothing hangs or crashes at exit: a daemon thread that waits in a call returns."""
    program = """
        import threading, time, unisono
        comms = unisono.init_threads(2, timeout_s=30)
        entered = threading.Event()
        def wait():
            entered.set()
            comms[0].barrier()
        threading.Thread(target=wait, daemon=True).start()
        entered.wait()
        time.sleep(0.2)
        print("main ends", flush=True)
    """
    ended = ranks.run([sys.executable, "-c", textwrap.dedent(program)], timeout_s=60)
    assert ended.code == 0, str(ended)
    assert ended.output.splitlines()[0] == "main ends"


def test_launcher_that_is_killed_takes_its_ranks_along() -> None:
    program = "import os, signal, unisono; c = unisono.init(timeout_s=30); c.barrier()\n"
    program += "if c.rank == 0: os.kill(os.getppid(), signal.SIGKILL)\n"
    program += "c.barrier()\nc.recv(bytearray(8), 1 - c.rank)"
    marker = ranks.new_marker()
    ended = ranks.launch(2, [sys.executable, "-c", program], marker)
    assert ended.code == -9
    assert ranks.gone(marker["UNISONO_TEST"], within_s=NOTICED_S), os.listdir("/dev/shm")
