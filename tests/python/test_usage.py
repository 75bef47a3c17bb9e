"""Calls that are wrong by themselves: a UsageError before anything moves, and the communicator goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranks
import threads
import unisono

F32 = np.float32
Call = Callable[[unisono.Communicator], Any]


@pytest.fixture(scope="module")
def comms() -> Iterator[list[unisono.Communicator]]:
    """Yields the communicators of two threads for all tests here. No test may break them."""
    with threads.team(2, timeout_s=10) as made:
        yield made


def ones(*shape: int, dtype: Any = F32) -> Any:
    return np.ones(shape, dtype)


def assert_refused(comms: list[unisono.Communicator], call: Call, *words: str) -> None:
    """Checks that both ranks get a UsageError with these words, and that the next call is right."""
    for rank, error in enumerate(threads.attempt(comms, call)):
        assert isinstance(error, unisono.UsageError), f"rank {rank}: {error!r}"
        assert isinstance(error, ValueError)
        for word in words:
            assert word in str(error), f"{word!r} is missing: {error}"
        assert str(error).endswith("."), error
    total = threads.together(comms, lambda c: c.all_reduce(np.full(100, c.rank + 1, F32)))
    assert all((one == 3).all() for one in total)


read_only = np.ones(4, F32)
read_only.flags.writeable = False

ARRAYS = {
    "strided": (lambda c: c.all_reduce(ones(8)[::2]), "x is not contiguous"),
    "reversed": (lambda c: c.all_reduce(ones(8)[::-1]), "x is not contiguous"),
    "Fortran order": (lambda c: c.all_reduce(np.ones((3, 4), F32, order="F")), "x is not contiguous"),
    "broadcast view": (lambda c: c.all_reduce(np.broadcast_to(ones(1), (4,))), "x is not contiguous"),
    "strided out": (lambda c: c.all_reduce(ones(4), out=ones(8)[::2]), "out is not contiguous"),
    "strided bf16": (lambda c: c.all_reduce(ones(8, dtype=ml_dtypes.bfloat16)[::2]), "x is not contiguous"),
    "strided bf16 out": (
        lambda c: c.all_gather(
            ones(4, dtype=ml_dtypes.bfloat16), out=ones(4, 4, dtype=ml_dtypes.bfloat16)[::2]
        ),
        "out is not contiguous",
    ),
    "read-only out": (lambda c: c.all_reduce(ones(4), out=read_only), "out is read-only"),
    "read-only fp8 out": (
        lambda c: c.all_reduce(
            ones(4, dtype=ml_dtypes.float8_e5m2), out=_frozen(ones(4, dtype=ml_dtypes.float8_e5m2))
        ),
        "out is read-only",
    ),
    "read-only recv": (lambda c: c.recv(read_only, 1 - c.rank), "out is read-only"),
    "bytes": (lambda c: c.recv(b"12345678", 1 - c.rank), "out is read-only"),
    "list": (
        lambda c: c.all_reduce([1.0, 2.0]),
        "x is a list: pass a numpy or cupy array, or a torch tensor.",
    ),
    "str": (lambda c: c.all_reduce("abcd"), "x is a str: pass a numpy or cupy array, or a torch tensor."),
    "number": (lambda c: c.all_reduce(3.5), "x is a float: pass a numpy or cupy array, or a torch tensor."),
    "class": (
        lambda c: c.all_reduce(np.ndarray),
        "x is the class ndarray: pass a numpy or cupy array, or a torch tensor.",
    ),
    "list as out": (
        lambda c: c.all_reduce(ones(2), out=[0.0, 0.0]),
        "out is a list: pass a numpy or cupy array, or a torch tensor.",
    ),
    "other dtype of out": (
        lambda c: c.all_reduce(ones(4), out=np.ones(4)),
        "out has dtype f64, but x has f32",
    ),
    "other sign of out": (
        lambda c: c.all_reduce(ones(4, dtype=np.int8), out=ones(4, dtype=np.uint8)),
        "out has dtype u8, but x has i8",
    ),
    "other shape of out": (
        lambda c: c.all_reduce(ones(4), out=ones(5)),
        "out has shape (5,): this call gives (4,)",
    ),
    "other axes of out": (
        lambda c: c.all_reduce(ones(4), out=ones(2, 2)),
        "shape (2, 2): this call gives (4,)",
    ),
    "all_gather without ranks": (lambda c: c.all_gather(ones(4), out=ones(4)), "this call gives (2, 4)"),
    "all_gather of other ranks": (lambda c: c.all_gather(ones(4), out=ones(3, 4)), "this call gives (2, 4)"),
    "reduce_scatter of 3": (lambda c: c.reduce_scatter(ones(3, 4)), "its first axis is the ranks, 2"),
    "reduce_scatter of a number": (
        lambda c: c.reduce_scatter(np.float32(1)),
        "its first axis is the ranks, 2",
    ),
    "reduce_scatter out": (lambda c: c.reduce_scatter(ones(2, 4), out=ones(2, 4)), "this call gives (4,)"),
    "scatter of 3": (lambda c: c.scatter(ones(3, 4)), "its first axis is the ranks, 2"),
    "scatter of nothing": (
        lambda c: c.scatter(None, root=c.rank, out=ones(4)),
        "scatter needs x at the root",
    ),
    "scatter into nothing": (lambda c: c.scatter(None, root=1 - c.rank), "scatter without x needs out"),
    "all_to_all of 3": (lambda c: c.all_to_all(ones(3, 4)), "its first axis is the ranks, 2"),
    "all_to_all out": (lambda c: c.all_to_all(ones(2, 4), out=ones(2, 5)), "this call gives (2, 4)"),
}


def _frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("case", ARRAYS)
def test_array_that_does_not_fit(case: str, comms: list[unisono.Communicator]) -> None:
    call, words = ARRAYS[case]
    assert_refused(comms, call, words)


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool uint16 uint32 uint64 int16 complex64 complex128 longdouble object str S4".split()),
        *("datetime64[s] >f4 >i8".split()),
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e4m3,
        ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.int4,
        np.dtype([("a", "f4"), ("b", "f4")]),
    ],
    ids=str,
)
def test_dtype_that_is_not_supported(dtype: Any, comms: list[unisono.Communicator]) -> None:
    x = np.zeros(4, dtype)
    assert_refused(comms, lambda c: c.all_reduce(x), "x has elements of type", "use f32, f64, f16")
    assert_refused(
        comms, lambda c: c.all_gather(ones(4), out=np.zeros((2, 4), dtype)), "out has elements of type"
    )
    assert_refused(comms, lambda c: c.empty(4, x.dtype), "has elements of type")


ROOTED: dict[str, Call] = {
    "reduce": lambda c, root: c.reduce(ones(4), root=root),  # type: ignore[misc]
    "broadcast": lambda c, root: c.broadcast(ones(4), root=root),  # type: ignore[misc]
    "gather": lambda c, root: c.gather(ones(4), root=root),  # type: ignore[misc]
    "scatter": lambda c, root: c.scatter(ones(2, 4), root=root),  # type: ignore[misc]
}


@pytest.mark.parametrize("root", [-1, 2, 1000, -(2**31), 2**31 - 1, 2**31, 2**64])
@pytest.mark.parametrize("collective", ROOTED)
def test_root_out_of_range(collective: str, root: int, comms: list[unisono.Communicator]) -> None:
    call: Any = ROOTED[collective]
    assert_refused(comms, lambda c: call(c, root), f"root {root} is not a rank: there are ranks 0 to 1")


NO_ARGUMENTS: dict[str, Call] = {
    "half a root": lambda c: c.gather(ones(4), root=0.5),
    "root None": lambda c: c.broadcast(ones(4), root=None),
    "root in words": lambda c: c.broadcast(ones(4), root="0"),
    "x None": lambda c: c.all_reduce(None),
    "op None": lambda c: c.all_reduce(ones(4), op=None),
    "shape None": lambda c: c.empty(None),
    "peer None": lambda c: c.send(ones(4), None),
}


def test_window_without_gpus(comms: list[unisono.Communicator]) -> None:
    assert_refused(comms, lambda c: c.window(64), "a window is for ranks of one node with a GPU each")
    assert_refused(comms, lambda c: c.window(-1), "nbytes", "-1")


def test_op_of_another_library(comms: list[unisono.Communicator]) -> None:
    class RedOpType(Enum):
        SUM = 0

    op: Any = RedOpType.SUM
    assert_refused(comms, lambda c: c.all_reduce(ones(4), op), "no op 'RedOpType.SUM': use sum, prod,")
    assert_refused(comms, lambda c: c.reduce(ones(4), op=1), "no op '1': use sum, prod,")  # type: ignore[arg-type]


@pytest.mark.parametrize("case", NO_ARGUMENTS)
def test_argument_of_another_type(case: str, comms: list[unisono.Communicator]) -> None:
    for error in threads.attempt(comms, NO_ARGUMENTS[case]):
        assert isinstance(error, TypeError), repr(error)
    threads.together(comms, lambda c: c.barrier())


def overlap_calls(c: unisono.Communicator, memory: Any) -> dict[str, Callable[[], Any]]:
    """Returns by collective a call whose buffers overlap in `memory` of 20 elements, but not in place."""
    r = c.rank
    x, out = memory[:8], memory[7:15]
    whole, shifted = memory[:16].reshape(2, 8), memory[1:9]
    others = whole[1 - r]
    return {
        "all_reduce": lambda: c.all_reduce(x, out=out),
        "reduce": lambda: c.reduce(x, out=out, root=r),
        "broadcast": lambda: c.broadcast(x, out=out, root=r),
        "all_gather": lambda: c.all_gather(shifted, out=whole),
        "all_gather of the other's block": lambda: c.all_gather(others, out=whole),
        "gather": lambda: c.gather(shifted, out=whole, root=r),
        "gather of the other's block": lambda: c.gather(others, out=whole, root=r),
        "reduce_scatter": lambda: c.reduce_scatter(whole, out=shifted),
        "reduce_scatter to the other's block": lambda: c.reduce_scatter(whole, out=others),
        "scatter": lambda: c.scatter(whole, out=shifted, root=r),
        "scatter to the other's block": lambda: c.scatter(whole, out=others, root=r),
        "all_to_all": lambda: c.all_to_all(x.reshape(2, 4), out=out.reshape(2, 4)),
        "all_to_all_v": lambda: c.all_to_all_v(x, [4, 4], [4, 4], out=out),
        "send_recv": lambda: c.send_recv(x, 1 - r, out, 1 - r),
    }


@pytest.mark.parametrize("memory", ["plain", "symmetric"])
@pytest.mark.parametrize("name", list(overlap_calls(unisono.init(), np.empty(20))))
def test_overlap(name: str, memory: str, comms: list[unisono.Communicator]) -> None:
    make = (lambda c: c.empty(20, F32)) if memory == "symmetric" else (lambda c: np.empty(20, F32))
    memories = threads.together(comms, make)
    for one in memories:
        one[:] = np.arange(20)
    assert_refused(
        comms,
        lambda c: overlap_calls(c, memories[c.rank])[name](),
        f"of {name.partition(' ')[0]} overlap without being in place",
    )
    assert all((one == np.arange(20)).all() for one in memories), "something has moved"


def test_all_to_all_v_in_place_of_unequal_counts() -> None:
    with threads.team(3) as comms:
        turn = lambda r: ([0, 1, 2], [2, 0, 1], [1, 2, 0])[r]  # noqa: E731
        back = lambda r: ([0, 2, 1], [1, 0, 2], [2, 1, 0])[r]  # noqa: E731
        x = ones(3)
        for error in threads.attempt(comms, lambda c: c.all_to_all_v(x, turn(c.rank), back(c.rank), out=x)):
            assert isinstance(error, unisono.UsageError) and "in place needs the same" in str(error)


class _Shortens:
    """The number 1, which empties its list when it is read."""

    def __init__(self, counts: list[Any]) -> None:
        self._counts = counts

    def __index__(self) -> int:
        self._counts.clear()
        return 1


def _shortened() -> list[Any]:
    counts: list[Any] = []
    counts += [_Shortens(counts), 1]
    return counts


COUNTS: dict[str, tuple[Call, str]] = {
    "fewer while they are read": (lambda c: c.all_to_all_v(ones(1), _shortened(), [1, 1]), "needs 2 send"),
    "too few": (lambda c: c.all_to_all_v(ones(1), [1], [1]), "needs 2 send counts"),
    "too many": (lambda c: c.all_to_all_v(ones(3), [1, 1, 1], [1, 1, 1]), "needs 2 send counts"),
    "none": (lambda c: c.all_to_all_v(ones(0), [], []), "needs 2 send counts"),
    "receives of another length": (lambda c: c.all_to_all_v(ones(2), [1, 1], [2]), "needs 2 receive counts"),
    "another sum": (lambda c: c.all_to_all_v(ones(3), [1, 1], [1, 1]), "the send counts add up to 2"),
    "two axes": (lambda c: c.all_to_all_v(ones(2, 1), [1, 1], [1, 1]), "pass a 1-D x"),
    "another out": (lambda c: c.all_to_all_v(ones(2), [1, 1], [1, 1], out=ones(3)), "this call gives (2,)"),
    "other for itself": (
        lambda c: c.all_to_all_v(ones(9), _self(c.rank, 7), _self(c.rank, 2)),
        "sends itself 7 elements, but receives 2",
    ),
    "below 0": (lambda c: c.all_to_all_v(ones(2), [-1, 3], [1, 1]), "send counts [-1, 3] are no numbers"),
    "a half": (lambda c: c.all_to_all_v(ones(2), [1, 1], [0.5, 1]), "receive counts [0.5, 1] are no numbers"),
    "words": (lambda c: c.all_to_all_v(ones(2), ["1", "1"], [1, 1]), "are no numbers"),
    "no list": (lambda c: c.all_to_all_v(ones(2), 2, [1, 1]), "send counts 2 are no numbers"),
    "a receive past memory": (lambda c: c.all_to_all_v(ones(2), [1, 1], [1, 2**62]), "than memory can hold"),
    "past 2^64": (
        lambda c: c.all_to_all_v(ones(0, dtype="i1"), [2**63] * 2, [2**63] * 2),
        "than memory can hold",
    ),
    "past memory": (
        lambda c: c.all_to_all_v(ones(0, dtype="i8"), [2**63] * 2, [2**63] * 2),
        "than memory can hold",
    ),
}


def _self(rank: int, count: int) -> list[int]:
    return [count, 9 - count] if rank == 0 else [9 - count, count]


@pytest.mark.parametrize("case", COUNTS)
def test_counts_that_do_not_fit(case: str, comms: list[unisono.Communicator]) -> None:
    call, words = COUNTS[case]
    assert_refused(comms, call, words)


@pytest.mark.parametrize("n", [1, 4])
def test_counts_that_wrap(n: int) -> None:
    """Counts whose bytes add up to 2^64 do not count as 0."""
    with threads.team(n) as comms:
        counts = [2**64 // n // 8] * n if n > 1 else [2**62]
        x = np.ones(0, np.int64)
        for error in threads.attempt(comms, lambda c: c.all_to_all_v(x, counts, counts)):
            assert isinstance(error, unisono.UsageError)


def test_own_counts_that_differ_alone() -> None:
    with (
        unisono.init() as comm,
        pytest.raises(unisono.UsageError, match="sends itself 3 elements, but receives 5"),
    ):
        comm.all_to_all_v(ones(3), [3], [5])


def exchange_in_place(comm: unisono.Communicator) -> Any:
    x = ones(2, 4)
    return comm.all_to_all(x, out=x, algorithm="direct")


NAMES: dict[str, tuple[Call, str]] = {
    "op": (lambda c: c.all_reduce(ones(4), op="mean"), "use sum, prod, min, max, avg, band, bor or bxor"),
    "band of floats": (
        lambda c: c.all_reduce(ones(4), op="band"),
        "band is for integers (i8, u8, i32, i64), not f32: give an array of them",
    ),
    "bor of floats": (lambda c: c.reduce(ones(4), op="bor"), "bor is for integers"),
    "bxor of floats": (lambda c: c.reduce_scatter(ones(c.size, 4), "bxor"), "bxor is for integers"),
    "op with a NUL": (lambda c: c.all_reduce(ones(4), op="sum\0x"), r"no op 'sum\0x': use sum, prod"),
    "dtype that is no UTF-8": (lambda c: c.empty(3, "\ud800"), r"elements of type \ud800: use f32,"),
    "empty op": (lambda c: c.reduce_scatter(ones(2, 4), op=""), "no op ''"),
    "algorithm": (
        lambda c: c.all_reduce(ones(4), algorithm="ring"),
        "no algorithm 'ring' here: use one of one_shot_packets",
    ),
    "algorithm of another collective": (
        lambda c: c.all_gather(ones(4), algorithm="two_shot"),
        "all_gather has no algorithm 'two_shot' here: use one of push_packets, push, direct",
    ),
    "algorithm of a send": (
        lambda c: c.send(ones(4), 1 - c.rank, algorithm="one_shot"),
        "send has no algorithm",
    ),
    "collective": (lambda c: c.plan("all_scatter", 8), "no collective 'all_scatter'"),
    "collective of algorithms": (lambda c: c.algorithms("sum"), "no collective 'sum'"),
    "direct exchange in place": (exchange_in_place, "out of place"),
}


@pytest.mark.parametrize("case", NAMES)
def test_name_that_is_not_known(case: str, comms: list[unisono.Communicator]) -> None:
    call, words = NAMES[case]
    assert_refused(comms, call, words)


def overlapping_batch(comm: unisono.Communicator) -> None:
    x, peer = ones(8), 1 - comm.rank
    comm.batch_send_recv([(x[:5], peer)], [(x[4:], peer)])


PEERS: dict[str, tuple[Call, str]] = {
    "send to itself": (lambda c: c.send(ones(4), c.rank), "cannot send to itself alone: use send_recv"),
    "recv from itself": (lambda c: c.recv(ones(4), c.rank), "cannot send to itself alone: use send_recv"),
    "send to nobody": (lambda c: c.send(ones(4), 2), "destination 2 is not a rank"),
    "send to -1": (lambda c: c.send(ones(4), -1), "destination -1 is not a rank"),
    "recv from nobody": (lambda c: c.recv(ones(4), 2), "source 2 is not a rank"),
    "recv from -1": (lambda c: c.recv(ones(4), -1), "source -1 is not a rank"),
    "exchange with nobody": (lambda c: c.send_recv(ones(4), 5, None, 0), "destination 5 is not a rank"),
    "exchange from -1": (lambda c: c.send_recv(ones(4), 0, None, -1), "source -1 is not a rank"),
    "half with itself": (lambda c: c.send_recv(ones(4), c.rank, None, 1 - c.rank), "send_recv with itself"),
    "shape of an exchange": (lambda c: c.send_recv(ones(4), 0, ones(5), 0), "this call gives (4,)"),
    "batch to nobody": (lambda c: c.batch_send_recv([(ones(4), 2)], []), "destination 2 is not a rank"),
    "batch from -1": (lambda c: c.batch_send_recv([], [(ones(4), -1)]), "source -1 is not a rank"),
    "batch with two to one": (
        lambda c: c.batch_send_recv([(ones(4), 0), (ones(4), 0)], []),
        "two messages with destination 0",
    ),
    "batch to itself alone": (
        lambda c: c.batch_send_recv([(ones(4), c.rank)], []),
        "sends itself 16 bytes, but receives 0 from itself",
    ),
    "batch to itself of another size": (
        lambda c: c.batch_send_recv([(ones(4), c.rank)], [(ones(5), c.rank)]),
        "sends itself 16 bytes, but receives 20 from itself",
    ),
    "batch into what it sends": (overlapping_batch, "overlaps another of its buffers"),
    "batch of a list": (lambda c: c.batch_send_recv([([1.0], 1 - c.rank)], []), "x is a"),
}


@pytest.mark.parametrize("case", PEERS)
def test_peer_that_does_not_fit(case: str, comms: list[unisono.Communicator]) -> None:
    call, words = PEERS[case]
    assert_refused(comms, call, words)


@pytest.mark.parametrize("shape", [-1, (3, -1), "abc", 2.5, (2.5,), ((1, 2),)], ids=str)
def test_wrong_shape(shape: Any, comms: list[unisono.Communicator]) -> None:
    assert_refused(comms, lambda c: c.empty(shape, F32), "is not a shape")


def test_direct_needs_reach() -> None:
    """Without copies between processes, a direct algorithm needs symmetric buffers; the error says so."""
    outcome = ranks.play(2, "fault_programs:direct_without_reach", env={"UNISONO_FAR": "0"})
    for answer in outcome.results():
        assert answer["first"]["error"]["type"] == "UsageError"
        assert "needs buffers from Communicator::empty on every rank" in answer["first"]["error"]["text"]
        assert answer["sum"] == 2


def test_outputs_stay_untouched(comms: list[unisono.Communicator]) -> None:
    out = [np.full((2, 4), 7, F32) for _ in comms]
    assert_refused(
        comms, lambda c: c.all_gather(ones(4)[::2], out=out[c.rank][:, :2].copy()), "not contiguous"
    )
    assert_refused(comms, lambda c: c.all_gather(ones(5), out=out[c.rank]), "this call gives (2, 5)")
    assert_refused(comms, lambda c: c.all_gather(ones(4), out=out[c.rank], algorithm="?"), "has no algorithm")
    assert_refused(comms, lambda c: c.gather(ones(4), root=9, out=out[c.rank]), "root 9 is not a rank")
    assert all((one == 7).all() for one in out)
