"""Calls that begin: asynchronous=True, and the Work that they return."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest

import ranks
import threads
import unisono
from every_call import EveryCall, assert_alike

F32 = np.float32


def test_every_call_can_begin() -> None:
    def body(comm: unisono.Communicator) -> None:
        every = EveryCall(comm)
        mine, theirs = every.outputs(), every.outputs()
        begun = [work.wait() for work in every.make(comm, mine, asynchronous=True)]
        assert_alike([*begun, *mine], [*every.make(comm, theirs), *theirs])

    with threads.team(3, check=False) as comms:
        threads.together(comms, body)


def test_arrays_live_until_the_call_has_ended() -> None:
    def body(comm: unisono.Communicator) -> list[float]:
        works = []
        for i in range(20):
            works.append(comm.all_reduce(np.full(100_000, i, F32), asynchronous=True))
            gc.collect()
            np.full(100_000, -1, F32)  # would take the place of an array that is freed
        return [float(work.wait()[-1]) for work in works]

    with threads.team(2) as comms:
        assert threads.together(comms, body) == [[2 * i for i in range(20)]] * 2


def test_handles_may_be_dropped() -> None:
    def body(comm: unisono.Communicator) -> float:
        x = np.ones(1000, F32)
        for _ in range(10):
            comm.all_reduce(x, out=x, asynchronous=True)
        comm.barrier()
        return float(x[0])

    with threads.team(2) as comms:
        assert threads.together(comms, body) == [1024.0] * 2


def test_a_wait_has_a_timeout() -> None:
    with threads.team(2) as comms:
        x, y = np.ones(3, F32), np.ones(3, F32)
        work = comms[0].all_reduce(x, out=x, asynchronous=True)
        assert not work.done
        assert work.error is None
        for seconds in (0.001, 0.12):
            with pytest.raises(unisono.TimeoutError, match="has not ended within"):
                work.wait(seconds)
        with pytest.raises(unisono.UsageError, match="is no deadline"):
            work.wait(0)
        comms[1].all_reduce(y, out=y)
        assert work.wait(60) is x
        assert work.wait() is x
        assert work.done
        assert (x == 2).all()


def test_wrong_calls_raise_at_once() -> None:
    with threads.team(2) as comms:
        for call in (
            lambda c: c.all_reduce(np.ones(3, F32), op="nonsense", asynchronous=True),
            lambda c: c.all_reduce(np.ones(3, F32), algorithm="magic", asynchronous=True),
            lambda c: c.broadcast(np.ones(3, F32), root=5, asynchronous=True),
            lambda c: c.all_reduce("no array", asynchronous=True),
        ):
            with pytest.raises(unisono.UsageError):
                call(comms[0])
        # what was refused leaves no trace: the next call waits
        assert threads.together(comms, lambda c: float(c.all_reduce(np.ones(1, F32))[0])) == [2, 2]


def test_errors_are_of_the_work() -> None:
    def body(comm: unisono.Communicator) -> list[str]:
        x = np.ones(3 if comm.rank == 0 else 4, F32)
        works = [comm.all_reduce(x, asynchronous=True), comm.barrier(asynchronous=True)]
        texts = []
        for work in works:
            with pytest.raises(unisono.MismatchError) as raised:
                work.wait()
            assert work.done
            assert type(work.error) is unisono.MismatchError
            assert str(work.error) == str(raised.value)
            texts.append(str(raised.value))
        return texts

    with threads.team(2, check=True) as comms:
        one, two = threads.together(comms, body)
        assert one == two
        assert one[0] == one[1]
        assert "called all_reduce(sum) of 3 f32" in one[0]


@pytest.mark.parametrize("way", ["close", "drop"])
def test_the_end_of_a_communicator_ends_its_calls(way: str) -> None:
    comms = list(unisono.init_threads(2))
    works = [comms[0].all_reduce(np.ones(3, F32), asynchronous=True) for _ in range(3)]
    if way == "close":
        comms[0].close()
    else:
        del comms[0]
        gc.collect()
    for work in works:
        with pytest.raises(unisono.UsageError, match="closed"):
            work.wait()


@pytest.mark.parametrize("ends", ["", "sys.exit(0)", "os._exit(0)"])
def test_a_program_may_end_while_a_call_is_under_way(ends: str) -> None:
    code = (
        "import os, sys, numpy as np, unisono\n"
        "comms = unisono.init_threads(2)\n"
        "works = [comms[0].all_reduce(np.ones(3), asynchronous=True) for _ in range(3)]\n"
        f"{ends}\n"
    )
    ended = ranks.run([sys.executable, "-c", code], timeout_s=30)
    assert ended.code == 0, str(ended)
    assert not ended.output, ended.output


def test_a_forked_child_is_refused() -> None:
    with threads.team(2) as comms:
        work = comms[0].barrier(asynchronous=True)
        child = os.fork()
        if child == 0:
            try:
                work.wait()
            except unisono.UsageError as error:
                os._exit(0 if "was forked from a rank" in str(error) else 2)
            os._exit(3)
        assert os.waitpid(child, 0)[1] == 0
        comms[1].barrier()
        work.wait()


def test_processes() -> None:
    code = (
        "import numpy as np, unisono\n"
        "with unisono.init() as comm:\n"
        "    works = [comm.all_reduce(np.full(n, 1.0), asynchronous=True) for n in (1, 1000, 300000)]\n"
        "    assert comm.all_reduce(np.ones(1))[0] == 3\n"
        "    assert all(work.done and (work.wait() == 3).all() for work in works)\n"
    )
    ended = ranks.launch(3, [sys.executable, "-c", code])
    assert ended.code == 0, str(ended)
