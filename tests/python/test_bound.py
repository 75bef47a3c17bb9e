"""Bound calls: comm.bind, and the functions that its methods return."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import threads
import unisono
from every_call import EveryCall, assert_alike

F32 = np.float32


def test_every_call_can_be_bound() -> None:
    def body(comm: unisono.Communicator) -> None:
        every = EveryCall(comm)
        mine, theirs = every.outputs(), every.outputs()
        steps = every.make(comm.bind, mine)
        for _ in range(3):
            every.x += every.random.integers(0, 9, every.x.shape, dtype=np.int32)
            every.packed += 1
            bound = [step() for step in steps]
            assert all(again is one for again, one in zip([step() for step in steps], bound, strict=True))
            assert_alike([*bound, *mine], [*every.make(comm, theirs), *theirs])

    with threads.team(3, check=False) as comms:
        threads.together(comms, body)


def test_messages_with_tags() -> None:
    def body(comm: unisono.Communicator) -> None:
        x, out = np.zeros(40), np.zeros(50)
        if comm.rank == 0:
            steps = [comm.bind.recv(out, unisono.ANY_SOURCE, tag=7) for _ in range(2)]
            ranks = [step() for step in steps for _ in range(2)]
            assert [one.nbytes for one in ranks] == [8 * 40] * 4
            assert sorted(one.source for one in ranks) == [1, 1, 2, 2]
            assert all(one.array is out for one in ranks)
            assert out[0] == 10 * ranks[-1].source + 1
        else:
            step = comm.bind.send(x, 0, tag=7)
            for i in range(2):
                x[:] = 10 * comm.rank + i
                assert step() is None

    with threads.team(3) as comms:
        threads.together(comms, body)


def test_arrays_and_names_live_as_long_as_the_step() -> None:
    def body(comm: unisono.Communicator) -> list[float]:
        name = "".join(["one_", "shot"])  # a text that nothing else holds
        step = comm.bind.all_reduce(np.full(100_000, comm.rank + 1, F32), algorithm=name)
        del name
        gc.collect()
        for i in range(3):
            np.full(100_000, -1, F32)  # would take the place of an array that is freed
            "".join(["magic", str(i)])
        return [float(step()[-1]) for _ in range(3)]

    with threads.team(2) as comms:
        assert threads.together(comms, body) == [[3, 3, 3]] * 2


def test_wrong_calls_are_refused_when_they_are_bound() -> None:
    with threads.team(2) as comms:
        x = np.ones(3, F32)
        frozen = np.zeros(3, F32)
        frozen.flags.writeable = False
        for call in (
            lambda c: c.bind.all_reduce(x, op="nonsense"),
            lambda c: c.bind.all_reduce(x, out=np.ones(4, F32)),
            lambda c: c.bind.all_reduce(x, out=frozen),
            lambda c: c.bind.all_reduce("no array"),
        ):
            with pytest.raises(unisono.UsageError):
                call(comms[0])
        # what was refused leaves no trace: the next call runs
        assert threads.together(comms, lambda c: float(c.all_reduce(np.ones(1, F32))[0])) == [2, 2]
        steps = [c.bind.all_reduce(x, algorithm="magic") for c in comms]
        for step in steps:
            with pytest.raises(unisono.UsageError, match="no algorithm 'magic'"):
                step()


def test_a_step_of_a_closed_communicator() -> None:
    with threads.team(2) as comms:
        steps = [c.bind.all_reduce(np.ones(3, F32)) for c in comms]
        assert [float(one[0]) for one in threads.together(comms, lambda c: steps[c.rank]())] == [2, 2]
    for step in steps:
        with pytest.raises(unisono.UsageError, match="the communicator is closed"):
            step()
    del comms
    gc.collect()
    with pytest.raises(unisono.UsageError, match="the communicator is closed"):
        steps[0]()  # it has its communicator still
