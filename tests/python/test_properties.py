"""Properties that hold for all sizes, shapes, dtypes, roots and ranks. Hypothesis looks for counterexamples.

Ranks are threads. Communicators are kept from one example to the next, so that calls follow each other in
ever new orders, as in a program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import threads
import unisono
from reference import DTYPES, combine, difference, ops_of, wild

RANKS = (1, 2, 3, 4, 5)
# Around the payload of a packet (56 bytes), half a ring of them (7168), a page and a chunk (65536), in
# elements of 1 to 8.
EDGES = [
    edge // item + step
    for edge in (56, 512, 4096, 7168, 65536)
    for item in (1, 2, 4, 8)
    for step in (-1, 0, 1)
]

ranks_of = st.sampled_from(RANKS)
dtypes = st.sampled_from(list(DTYPES))
kinds = st.sampled_from([(dtype, op) for dtype in DTYPES for op in ops_of(dtype)])
counts = st.one_of(st.integers(0, 70), st.sampled_from(EDGES), st.integers(0, 40_000))
seeds = st.integers(0, 1 << 20)
quick = settings(max_examples=60, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, list[unisono.Communicator]]]:
    made = {n: unisono.init_threads(n, timeout_s=30, check=True) for n in RANKS}
    yield made
    for comms in made.values():
        for comm in comms:
            comm.close()


Teams = dict[int, list[unisono.Communicator]]


def inputs(n: int, dtype: str, count: int, seed: int) -> list[Any]:
    """Returns random data of every rank, with infinities, NaN, denormals and negative zeros among floats."""
    return [wild(dtype, count, (seed, rank)) for rank in range(n)]


def assert_same(got: Any, expected: Any, what: str) -> None:
    wrong = difference(got, expected)
    assert wrong is None, f"{what}: {wrong}"


@quick
@given(ranks_of, kinds, counts, seeds)
def test_all_reduce_has_one_result(
    teams: Teams, n: int, kind: tuple[str, str], count: int, seed: int
) -> None:
    """The result is the same with every algorithm and any buffers, on every rank."""
    dtype, op = kind
    data = inputs(n, dtype, count, seed)
    expected = combine(data, op)

    def body(comm: unisono.Communicator) -> None:
        for algorithm in (None, *comm.algorithms("all_reduce")):
            x = data[comm.rank].copy()
            assert_same(comm.all_reduce(x, op=op, algorithm=algorithm), expected, f"{algorithm}")
            assert_same(
                comm.all_reduce(x, op=op, algorithm=algorithm, out=x), expected, f"{algorithm} in place"
            )
        x = comm.empty(count, DTYPES[dtype])
        x[:] = data[comm.rank]
        assert_same(comm.all_reduce(x, op=op), expected, "symmetric")

    threads.together(teams[n], body)


@quick
@given(ranks_of, kinds, counts, seeds)
def test_all_reduce_is_reduce_then_broadcast(
    teams: Teams, n: int, kind: tuple[str, str], count: int, seed: int
) -> None:
    dtype, op = kind
    data, root = inputs(n, dtype, count, seed), seed % n

    def body(comm: unisono.Communicator) -> None:
        x = data[comm.rank]
        reduced = comm.reduce(x, op=op, root=root)
        assert (reduced is not None) == (comm.rank == root)
        result = comm.broadcast(np.empty_like(x) if reduced is None else reduced, root=root)
        assert_same(result, comm.all_reduce(x, op=op), "reduce, then broadcast")

    threads.together(teams[n], body)


@quick
@given(ranks_of, kinds, counts, seeds)
def test_all_reduce_is_reduce_scatter_then_all_gather(
    teams: Teams, n: int, kind: tuple[str, str], count: int, seed: int
) -> None:
    dtype, op = kind
    data = inputs(n, dtype, n * count, seed)

    def body(comm: unisono.Communicator) -> None:
        x = data[comm.rank].reshape(n, count)
        mine = comm.reduce_scatter(x, op=op)
        assert_same(comm.all_gather(mine), comm.all_reduce(x, op=op), "reduce_scatter, then all_gather")
        assert_same(mine, comm.all_reduce(x, op=op)[comm.rank], "reduce_scatter")

    threads.together(teams[n], body)


@quick
@given(ranks_of, dtypes, counts, seeds)
def test_all_gather_is_gather_then_broadcast(teams: Teams, n: int, dtype: str, count: int, seed: int) -> None:
    data, root = inputs(n, dtype, count, seed), seed % n

    def body(comm: unisono.Communicator) -> None:
        gathered = comm.gather(data[comm.rank], root=root)
        if gathered is None:
            gathered = np.empty((n, count), DTYPES[dtype])
        comm.broadcast(gathered, root=root)
        assert_same(comm.all_gather(data[comm.rank]), gathered, "all_gather")
        assert_same(gathered, np.stack(data), "gather, then broadcast")

    threads.together(teams[n], body)


@quick
@given(ranks_of, dtypes, counts, seeds)
def test_scatter_undoes_gather(teams: Teams, n: int, dtype: str, count: int, seed: int) -> None:
    data, root = inputs(n, dtype, count, seed), seed % n

    def body(comm: unisono.Communicator) -> None:
        gathered = comm.gather(data[comm.rank], root=root)
        back = comm.scatter(gathered, root=root, out=np.empty(count, DTYPES[dtype]))
        assert_same(back, data[comm.rank], "gather, then scatter")

    threads.together(teams[n], body)


@quick
@given(ranks_of, dtypes, counts, seeds)
def test_all_to_all_twice_is_nothing(teams: Teams, n: int, dtype: str, count: int, seed: int) -> None:
    """all_to_all transposes the matrix of blocks, in place and out of place, by every algorithm."""
    data = inputs(n, dtype, n * count, seed)

    def body(comm: unisono.Communicator) -> None:
        x = data[comm.rank].reshape(n, count)
        column = np.stack([other.reshape(n, count)[comm.rank] for other in data])
        for algorithm in (None, *comm.algorithms("all_to_all")):
            once = comm.all_to_all(x, algorithm=algorithm)
            assert_same(once, column, f"{algorithm}")
            assert_same(comm.all_to_all(once, algorithm=algorithm), x, f"{algorithm}, twice")
            if algorithm != "direct":
                comm.all_to_all(once, out=once, algorithm=algorithm)
                assert_same(once, x, f"{algorithm}, in place")

    threads.together(teams[n], body)


@st.composite
def matrices(draw: st.DrawFn) -> list[list[int]]:
    """Draws how many elements each rank sends to each: often none, and sometimes many."""
    n = draw(ranks_of)
    each = st.one_of(st.just(0), st.integers(0, 30), st.sampled_from(EDGES))
    return draw(st.lists(st.lists(each, min_size=n, max_size=n), min_size=n, max_size=n))


@quick
@given(matrices(), dtypes, seeds)
def test_all_to_all_v(teams: Teams, matrix: list[list[int]], dtype: str, seed: int) -> None:
    n = len(matrix)
    data = [wild(dtype, sum(row), (seed, rank)) for rank, row in enumerate(matrix)]

    def body(comm: unisono.Communicator) -> None:
        me = comm.rank
        sends, receives = matrix[me], [row[me] for row in matrix]
        parts = [data[r][sum(row[:me]) : sum(row[: me + 1])] for r, row in enumerate(matrix)]
        expected = np.concatenate(parts)
        for algorithm in (None, *comm.algorithms("all_to_all_v")):
            got = comm.all_to_all_v(data[me], sends, receives, algorithm=algorithm)
            assert_same(got, expected, f"{algorithm}")

    threads.together(teams[n], body)


@quick
@given(matrices(), dtypes, seeds)
def test_all_to_all_v_in_place(teams: Teams, matrix: list[list[int]], dtype: str, seed: int) -> None:
    n = len(matrix)
    equal = [[matrix[max(i, j)][min(i, j)] for j in range(n)] for i in range(n)]
    data = [wild(dtype, sum(row), (seed, rank)) for rank, row in enumerate(equal)]

    def body(comm: unisono.Communicator) -> None:
        me = comm.rank
        x = data[me].copy()
        comm.all_to_all_v(x, equal[me], equal[me], out=x)
        parts = [data[r][sum(row[:me]) : sum(row[: me + 1])] for r, row in enumerate(equal)]
        assert_same(x, np.concatenate(parts), "in place")

    threads.together(teams[n], body)


@quick
@given(ranks_of, dtypes, st.lists(counts, min_size=1, max_size=6), st.integers(-5, 5), seeds)
def test_ring_of_messages(teams: Teams, n: int, dtype: str, sizes: list[int], step: int, seed: int) -> None:
    """Messages between two ranks arrive in the order of the sends, whichever calls carry them."""
    data = [[wild(dtype, size, (seed, rank, turn)) for turn, size in enumerate(sizes)] for rank in range(n)]

    def body(comm: unisono.Communicator) -> None:
        to, source = (comm.rank + step) % n, (comm.rank - step) % n
        for turn, x in enumerate(data[comm.rank]):
            got = comm.send_recv(x, to, None, source)
            assert_same(got, data[source][turn], f"message {turn}")

    threads.together(teams[n], body)


@quick
@given(ranks_of, st.lists(st.integers(0, 3), max_size=4), dtypes, seeds)
def test_shapes_are_kept(teams: Teams, n: int, shape: list[int], dtype: str, seed: int) -> None:
    x = wild(dtype, int(np.prod(shape)), (seed,)).reshape(shape)

    def body(comm: unisono.Communicator) -> None:
        assert comm.all_gather(x).shape == (n, *shape)
        assert_same(comm.all_gather(x)[comm.rank], x, "all_gather")
        assert comm.all_reduce(x).shape == tuple(shape)
        assert comm.reduce_scatter(comm.all_gather(x)).shape == tuple(shape)

    threads.together(teams[n], body)


@quick
@given(ranks_of, dtypes, st.sampled_from(("min", "max")), counts, seeds)
def test_min_and_max_of_equals(teams: Teams, n: int, dtype: str, op: str, count: int, seed: int) -> None:
    """min(x, x) is x, bit by bit."""
    x = wild(dtype, count, (seed,))

    def body(comm: unisono.Communicator) -> None:
        assert_same(comm.all_reduce(x, op=op), x, op)

    threads.together(teams[n], body)
