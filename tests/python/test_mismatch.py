"""Ranks whose calls differ: with check=True, every rank gets one MismatchError, which names both calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ranks
import threads
import unisono

Call = Callable[[unisono.Communicator], Any]
F32, F64 = np.float32, np.float64


def ones(count: int, dtype: Any = F32) -> Any:
    return np.ones(count, dtype)


@dataclass(frozen=True)
class Pair:
    """Two calls that do not match, and how the error names each. One rank calls `odd`, the others `usual`."""

    name: str
    usual: Call
    odd: Call
    words: tuple[str, str]


def rows(comm: unisono.Communicator, count: int, dtype: Any = F32) -> Any:
    return np.ones((comm.size, count), dtype)


def even(comm: unisono.Communicator, count: int = 2, **more: Any) -> Any:
    counts = [count] * comm.size
    return comm.all_to_all_v(ones(count * comm.size), counts, counts, **more)


PAIRS = (
    Pair(
        "collective",
        lambda c: c.all_reduce(ones(4)),
        lambda c: c.broadcast(ones(4)),
        ("all_reduce(sum) of 4 f32", "broadcast of 4 f32 with root 0"),
    ),
    Pair(
        "barrier", lambda c: c.all_gather(ones(4)), lambda c: c.barrier(), ("all_gather of 4 f32", "barrier")
    ),
    Pair(
        "allocation",
        lambda c: c.all_reduce(ones(4)),
        lambda c: c.empty(10, F32),
        ("all_reduce(sum) of 4 f32", "empty of 40 bytes"),
    ),
    Pair(
        "symmetric size",
        lambda c: c.empty(10, F32),
        lambda c: c.empty(11, F32),
        ("empty of 40 bytes", "empty of 44 bytes"),
    ),
    Pair(
        "count",
        lambda c: c.all_reduce(ones(4)),
        lambda c: c.all_reduce(ones(5)),
        ("all_reduce(sum) of 4 f32", "all_reduce(sum) of 5 f32"),
    ),
    Pair(
        "count 0",
        lambda c: c.all_reduce(ones(4)),
        lambda c: c.all_reduce(ones(0)),
        ("all_reduce(sum) of 4 f32", "all_reduce(sum) of 0 f32"),
    ),
    Pair(
        "large count",
        lambda c: c.all_gather(ones(1 << 18)),
        lambda c: c.all_gather(ones((1 << 18) + 1)),
        ("all_gather of 262144 f32", "all_gather of 262145 f32"),
    ),
    Pair(
        "dtype",
        lambda c: c.reduce_scatter(rows(c, 4)),
        lambda c: c.reduce_scatter(rows(c, 4, np.int32)),
        ("reduce_scatter(sum) of 4 f32", "reduce_scatter(sum) of 4 i32"),
    ),
    Pair(
        "op",
        lambda c: c.all_reduce(ones(4), op="max"),
        lambda c: c.all_reduce(ones(4), op="min"),
        ("all_reduce(max) of 4 f32", "all_reduce(min) of 4 f32"),
    ),
    Pair(
        "wire",
        lambda c: c.all_reduce(ones(4), wire="fp8"),
        lambda c: c.all_reduce(ones(4), wire="int8"),
        ("all_reduce(sum) of 4 f32 as fp8 by two_shot", "all_reduce(sum) of 4 f32 as int8 by two_shot"),
    ),
    Pair(
        "wire or none",
        lambda c: c.all_reduce(ones(4), algorithm="two_shot"),
        lambda c: c.all_reduce(ones(4), wire="int8"),
        ("all_reduce(sum) of 4 f32 by two_shot", "all_reduce(sum) of 4 f32 as int8 by two_shot"),
    ),
    Pair(
        "root",
        lambda c: c.reduce(ones(4), root=0),
        lambda c: c.reduce(ones(4), root=1),
        ("reduce(sum) of 4 f32 with root 0", "reduce(sum) of 4 f32 with root 1"),
    ),
    Pair(
        "root of a gather",
        lambda c: c.gather(ones(1 << 16), root=1),
        lambda c: c.gather(ones(1 << 16), root=2),
        ("gather of 65536 f32 with root 1", "gather of 65536 f32 with root 2"),
    ),
    Pair(
        "algorithm",
        lambda c: c.all_reduce(ones(4), algorithm="two_shot"),
        lambda c: c.all_reduce(ones(4), algorithm="one_shot"),
        ("all_reduce(sum) of 4 f32 by two_shot", "all_reduce(sum) of 4 f32 by one_shot"),
    ),
    Pair(
        "algorithm or none",
        lambda c: c.all_to_all(rows(c, 4)),
        lambda c: c.all_to_all(rows(c, 4), algorithm="push"),
        ("all_to_all of 4 f32", "all_to_all of 4 f32 by push"),
    ),
    Pair(
        "counts of all_to_all_v",
        even,
        lambda c: even(c, 3),
        ("all_to_all_v of 2 f32", "all_to_all_v of 3 f32"),
    ),
    Pair(
        "algorithm of all_to_all_v",
        lambda c: even(c, algorithm="push"),
        lambda c: even(c, algorithm="push_packets"),
        ("all_to_all_v of 2 f32 by push", "all_to_all_v of 2 f32 by push_packets"),
    ),
    Pair(
        "all_to_all_v or all_to_all",
        even,
        lambda c: c.all_to_all(rows(c, 2)),
        ("all_to_all_v of 2 f32", "all_to_all of 2 f32"),
    ),
)


def assert_same_mismatch(errors: list[Any], words: tuple[str, ...]) -> None:
    for rank, error in enumerate(errors):
        assert isinstance(error, unisono.MismatchError), f"rank {rank}: {error!r}"
    assert len({str(error) for error in errors}) == 1, "the ranks tell different stories"
    for word in words:
        assert word in str(errors[0]), f"{word!r} is missing: {errors[0]}"


@pytest.mark.parametrize("odd_rank", [0, 1, 2])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_mismatch(pair: Pair, odd_rank: int) -> None:
    with threads.team(3) as comms:
        errors = threads.attempt(comms, lambda c: (pair.odd if c.rank == odd_rank else pair.usual)(c))
        first, second = pair.words
        called = f"rank {odd_rank} called {second}"
        assert_same_mismatch(errors, (f"called {first}", called))
        later = threads.attempt(comms, lambda c: c.all_reduce(ones(1)))
        assert [str(error) for error in later] == [str(error) for error in errors]
        assert_same_mismatch(later, ())


def symmetric_ranks_and_plain(memory: str) -> Call:
    def call(comm: unisono.Communicator) -> Any:
        x = comm.empty(1 << 17, F32)
        if memory == "plain":
            x = np.ones(1 << 17, F32)
        x[:] = comm.rank
        return comm.all_reduce(x, op="min" if comm.rank == 1 else "max")

    return call


@pytest.mark.parametrize("memory", ["plain", "symmetric"])
def test_mismatch_of_large_calls(memory: str) -> None:
    """Direct algorithms compare the ranks' calls even if they need not."""
    with threads.team(3, check=False) as comms:
        errors = threads.attempt(comms, symmetric_ranks_and_plain(memory))
    assert_same_mismatch(
        errors, ("all_reduce(max) of 131072 f32", "rank 1 called all_reduce(min) of 131072 f32")
    )


SENT = (
    ("count", lambda c: c.send(ones(4), 1), lambda c: c.recv(ones(5), 0), ("of 4 f32", "of 5 f32")),
    ("dtype", lambda c: c.send(ones(4), 1), lambda c: c.recv(ones(4, F64), 0), ("of 4 f32", "of 4 f64")),
    (
        "algorithm",
        lambda c: c.send(ones(4), 1, algorithm="push"),
        lambda c: c.recv(ones(4), 0, algorithm="push_packets"),
        ("of 4 f32 by push:", "of 4 f32 by push_packets"),
    ),
    (
        "exchange",
        lambda c: c.send_recv(ones(4), 1, None, 1),
        lambda c: c.send_recv(ones(6), 0, None, 0),
        ("of 4 f32", "of 6 f32"),
    ),
    (
        "batch",
        lambda c: c.batch_send_recv([(ones(4), 1)], [(ones(2), 1)]),
        lambda c: c.batch_send_recv([(ones(2), 0)], [(ones(5), 0)]),
        ("of 16 u8", "of 20 u8"),
    ),
    (
        "batch and send",
        lambda c: c.batch_send_recv([(ones(4), 1)], []),
        lambda c: c.recv(ones(4), 0),
        ("batch_send_recv of 16 u8", "send_recv of 4 f32"),
    ),
)


@pytest.mark.parametrize(("name", "of_zero", "of_one", "words"), SENT, ids=[case[0] for case in SENT])
def test_mismatch_of_a_pair(name: str, of_zero: Call, of_one: Call, words: tuple[str, str]) -> None:
    """The receiver sees the mismatch. A sender that has left its call gets the error in the next call."""

    def body(comm: unisono.Communicator) -> None:
        (of_zero if comm.rank == 0 else of_one)(comm)
        comm.barrier()

    with threads.team(2) as comms:
        errors = threads.attempt(comms, body)
    assert_same_mismatch(errors, words)


def test_mismatch_between_processes() -> None:
    outcome = ranks.play(3, "fault_programs:differs_on_rank_1")
    errors = outcome.errors()
    assert {error["type"] for error in errors} == {"MismatchError"}
    assert len({error["text"] for error in errors}) == 1
    assert "rank 0 called all_reduce(sum) of 4 f32" in errors[0]["text"]
    assert "but rank 1 called all_reduce(sum) of 5 f32" in errors[0]["text"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_check_on_one_rank_alone(nodes: int) -> None:
    """A rank that compares and one that does not would misread each other's messages."""
    for error in ranks.play(2, "fault_programs:checks_on_rank_0", nodes=nodes).errors():
        assert error["type"] == "UsageError"
        assert "UNISONO_CHECK, the same on every rank" in error["text"]


def test_same_calls_with_different_shapes_fit() -> None:
    """Only counts are compared. The ranks' shapes may differ."""
    shapes = ((6,), (2, 3), (3, 2, 1))
    results = threads.with_threads(3, lambda c: c.all_reduce(np.ones(shapes[c.rank], F32)).shape)
    assert results == list(shapes)


def large_and_small(comm: unisono.Communicator) -> Any:
    """One rank is a call ahead of the others."""
    if comm.rank == 0:
        comm.broadcast(ones(4))
    return comm.all_reduce(ones(4))


def caught(comm: unisono.Communicator) -> Any:
    """Rank 1's call is wrong by itself, and its program ignores the error."""
    x = np.zeros(2, F32)
    if comm.rank == 1:
        x.flags.writeable = False
        with pytest.raises(unisono.UsageError, match="read-only"):
            comm.broadcast(x)
    else:
        comm.broadcast(x)
    return comm.all_to_all_v(ones(2), [1, 1], [1, 1])


def either(of_zero: Call, of_one: Call) -> Call:
    return lambda comm: (of_zero if comm.rank == 0 else of_one)(comm)


# without check=True
NOTICED: dict[str, Call] = {
    "a call ahead": large_and_small,
    "after an error": caught,
    "count": either(lambda c: c.all_reduce(ones(5)), lambda c: c.all_reduce(ones(6))),
    "count, in chunks": either(
        lambda c: c.all_gather(ones(1 << 14), algorithm="push"),
        lambda c: c.all_gather(ones((1 << 14) - 1), algorithm="push"),
    ),
    "dtype": either(lambda c: c.all_reduce(ones(4)), lambda c: c.all_reduce(ones(4, np.int32))),
    "op": either(lambda c: c.all_reduce(ones(4)), lambda c: c.all_reduce(ones(4), "prod")),
    "op, in chunks": either(
        lambda c: c.reduce_scatter(rows(c, 1 << 14), algorithm="push"),
        lambda c: c.reduce_scatter(rows(c, 1 << 14), "min", algorithm="push"),
    ),
    "wire": either(
        lambda c: c.all_reduce(ones(64), wire="fp8"), lambda c: c.all_reduce(ones(64), wire="int8")
    ),
    "collective": either(lambda c: c.all_reduce(ones(4)), lambda c: c.all_gather(ones(4))),
    "shorter": either(lambda c: c.send(ones(8), 1), lambda c: c.recv(ones(4), 0)),
    "longer": either(lambda c: c.send(ones(4), 1), lambda c: c.recv(ones(8), 0)),
    "part": either(
        lambda c: c.all_to_all_v(ones(3), [1, 2], [1, 1]), lambda c: c.all_to_all_v(ones(2), [1, 1], [1, 1])
    ),
    "part that is none": either(
        lambda c: c.all_to_all_v(ones(1), [1, 0], [1, 1]), lambda c: c.all_to_all_v(ones(2), [1, 1], [1, 1])
    ),
    "longer, direct": either(lambda c: c.send(ones(1 << 18), 1), lambda c: c.recv(ones((1 << 18) + 1), 0)),
}


@pytest.mark.parametrize("name", NOTICED)
def test_most_mismatches_are_noticed_without_a_check(name: str) -> None:
    """Each piece has the mark of its call. Only ranks that get a wrong piece notice, and tell the others."""

    def body(comm: unisono.Communicator) -> None:
        NOTICED[name](comm)
        comm.barrier()

    with threads.team(2, check=False) as comms:
        errors = threads.attempt(comms, body)
    assert_same_mismatch(errors, ("met another call of rank", "UNISONO_CHECK=1"))
