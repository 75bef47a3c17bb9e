"""The matrix of the contract suite: calls, their data and their results.

All functions of a `Work` are pure, so that every rank knows every rank's data without messages.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from reference import DTYPES, INTEGERS, OPS, Array, bound, combine, data, ops_of
from unisono import traits
from unisono.records import Case

COLLECTIVES = (
    "all_reduce reduce broadcast all_gather gather reduce_scatter scatter all_to_all all_to_all_v"
    " send_recv barrier"
).split()
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
BLOCKED = ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all", "all_to_all_v")
MEMORIES = ("plain", "symmetric")
LARGEST = 2 << 20  # bytes of the largest buffers, about; half of it from 4 ranks on
LONG = ("f32", "bf16")  # the dtypes of buffers from a chunk on: a kernel treats a dtype as in small sizes

# The borders of the host lane: the payload of a packet, half a ring of packets, a chunk.
PACKET, PACKETS, CHUNK, CHUNKS = 56, 7168, 65536, 8


@dataclass(frozen=True)
class Work:
    """One call on all ranks. `count`: elements of a buffer, or of a block if the collective has blocks."""

    case: Case
    count: int
    number: int  # in the order of the matrix; seeds what else is chosen
    algorithm: str | None = None
    check: bool = True
    tame: bool = False

    @property
    def offset(self) -> int:
        """Returns the element of the random data at which the input begins."""
        return self.count * 7919 % 20_011

    @property
    def shift(self) -> int:
        """Returns by how many elements the buffers are off their alignment."""
        return (0, 0, 1, 3)[self.number % 4]

    @property
    def in_place(self) -> bool:
        return self.case.placement == "in_place"

    def __str__(self) -> str:
        case = self.case
        op = f"({case.op})" if case.op else ""
        root = f" from root {case.root}" if case.root is not None else ""
        by = f" by {self.algorithm}" if self.algorithm else ""
        how = f"{case.placement} in {case.memory} memory{', checked' if self.check else ''}"
        return f"{case.collective}{op} of {self.count} {case.dtype}{root}{by}, {how}, work {self.number}"


def small_counts(item: int, ranks: int) -> list[int]:
    """Returns 0, 1, odd counts, and counts at the borders of packets, their rings, shards and the plan."""
    edges = (PACKET - 1, PACKET, PACKET + 1, 64 * ranks, 2048, PACKETS)
    near = [edge // item + step for edge in edges for step in (-1, 0, 1)]
    return sorted({0, 1, 2, 3, 5, 7, 13, 129, *(count for count in near if count > 0)})


def large_counts(item: int, ranks: int, blocks: int) -> list[int]:
    """Returns counts around the borders of chunks and their rings, and of 1 or 2 MB in all.

    `blocks`: the blocks of a buffer."""
    edges = (
        (CHUNK, -1),
        (CHUNK, 0),
        (CHUNK, 1),
        (PACKETS * ranks, 1),
        (CHUNK * ranks, 1),
        (CHUNK * CHUNKS, 1),
    )
    near = [edge // item + step for edge, step in edges]
    most = (LARGEST if ranks < 4 else LARGEST // 2) // item // blocks
    return sorted({*(count for count in near if count < most), most - 1})


def make(
    number: int,
    collective: str,
    count: int,
    dtype: str,
    ranks: int,
    op: str,
    placement: str,
    memory: str = "plain",
    **more: object,
) -> Work:
    """Returns a `Work` with the bench's case, and a root by its number."""
    blocks = ranks if collective in BLOCKED else 1
    case = Case(
        collective=collective,
        bytes=count * blocks * DTYPES[dtype].itemsize,
        dtype=dtype,
        op=op if collective in REDUCING else None,
        ranks=ranks,
        root=number % ranks if collective in ROOTED else None,
        placement=placement,
        memory=memory,
    )
    return Work(case, count, number, **more)  # type: ignore[arg-type]


def works_of_unisono(
    ranks: int, algorithms: Mapping[str, Sequence[str]], direct_reaches_all: bool, whole: bool
) -> list[Work]:
    """Returns the works of Unisono, shuffled.

    Every collective x algorithm x dtype x op x placement x memory, with small sizes in turn. Every collective
    x algorithm x placement x memory with every large size, with dtypes and ops in turn. An algorithm that the
    plan may not choose has half of the dtypes and ops in either memory: one half for odd numbers of ranks,
    the other for even numbers. Unless `whole`, each has a third of its dtypes and ops, and half of its large
    sizes, in turn.
    """
    numbers, turn, parts, works = itertools.count(), itertools.count(), itertools.count(ranks), []
    for collective, placement, memory in itertools.product(
        COLLECTIVES, ("out_of_place", "in_place"), MEMORIES
    ):
        if not _exists(collective, placement, memory):
            continue
        for algorithm in (None, *algorithms[collective]):
            direct = algorithm is not None and traits.algorithm(algorithm).direct
            if direct and ((memory == "plain" and not direct_reaches_all) or _swaps(collective, placement)):
                continue
            half = None if algorithm is None else (ranks + (memory == "symmetric")) % 2
            each = 1 if collective in REDUCING else 2
            part = None if whole else next(parts)
            for dtype, op, count in _choices(collective, ranks, each, turn, half, part):
                number = next(numbers)
                more = {"algorithm": algorithm, "check": number % 3 != 0}
                works.append(make(number, collective, count, dtype, ranks, op, placement, memory, **more))
    return _shuffled(works, ranks)


def works_of_others(ranks: int) -> list[Work]:
    """Returns the works of libraries without a choice of algorithm and memory, with tame floats: of more than
    3 ranks, a part as in `works_of_unisono`."""
    numbers, turn, parts, works = itertools.count(), itertools.count(), itertools.count(ranks), []
    for collective, placement in itertools.product(COLLECTIVES, ("out_of_place", "in_place")):
        if not _exists(collective, placement, "plain") or (collective, placement) == (
            "all_to_all_v",
            "in_place",
        ):
            continue
        part = None if ranks <= 3 else next(parts)
        for dtype, op, count in _choices(collective, ranks, 1, turn, part=part):
            works.append(make(next(numbers), collective, count, dtype, ranks, op, placement, tame=True))
    return _shuffled(works, ranks)


def _exists(collective: str, placement: str, memory: str) -> bool:
    if collective == "barrier":
        return (placement, memory) == ("out_of_place", "plain")
    return not (collective == "send_recv" and placement == "in_place")


def _swaps(collective: str, placement: str) -> bool:
    """Returns whether direct algorithms are refused in place, as peers would overwrite unsent blocks."""
    return placement == "in_place" and collective.startswith("all_to_all")


def _choices(
    collective: str,
    ranks: int,
    each: int,
    turn: Iterator[int],
    half: int | None = None,
    part: int | None = None,
) -> Iterator[tuple[str, str, int]]:
    """Yields dtype, op and count.

    First all pairs of dtype and op, or every other from `half` on, with `each` small counts. Then all large
    counts, each with one of four pairs only, since their expected results take most of the time. part: picks
    a third of these pairs, and half of the large counts."""
    if collective == "barrier":
        yield from [("u8", "sum", 0)] * 10
        return
    reduces = collective in REDUCING
    kinds = [(dtype, op) for dtype in DTYPES for op in (ops_of(dtype) if reduces else ("sum",))]
    blocks = ranks if collective in BLOCKED else 1
    for index, (dtype, op) in enumerate(kinds):
        if half is not None and index % 2 != half:
            continue
        if part is not None and index // 2 % 3 != part % 3:
            continue
        counts = small_counts(DTYPES[dtype].itemsize, ranks)
        for step in range(each):
            yield dtype, op, counts[(next(turn) + index * 5 + step * 11) % len(counts)]
    wide = [(dtype, op) for op in (OPS if reduces else ("sum",)) for dtype in LONG]
    first = next(turn) % 4
    for index in range(len(large_counts(4, ranks, blocks))):
        if part is not None and index % 2 != part % 2:
            continue
        dtype, op = wide[(2 * (index + ranks) + first) % len(wide)]
        counts = large_counts(DTYPES[dtype].itemsize, ranks, blocks)
        yield dtype, op, counts[index % len(counts)]


def _shuffled(works: list[Work], seed: int) -> list[Work]:
    random.Random(seed).shuffle(works)
    return works


# ---- what each rank has and gets --------------------------------------------------------------------------


@lru_cache(256)
def counts_matrix(work: Work) -> list[list[int]]:
    """Returns the counts of an all_to_all_v: row r has the counts that rank r sends to each rank.

    Some counts are 0. In place, a rank sends as much as it receives."""
    n = work.case.ranks
    rng = np.random.default_rng(work.number)
    matrix = rng.integers(0, work.count + 1, (n, n))
    matrix[rng.random((n, n)) < 0.25] = 0
    if n > 1 and work.number % 5 == 0:
        matrix[work.number % n] = 0
    if work.in_place:
        matrix = np.triu(matrix) + np.triu(matrix, 1).T
    return [[int(count) for count in row] for row in matrix]


def shapes(work: Work, rank: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Returns the shapes of x and out on a rank, as the API takes them; None: no such buffer."""
    n, count, at_root = work.case.ranks, work.count, work.case.root in (None, rank)
    one, all_blocks = (count,), (n, count)
    match work.case.collective:
        case "barrier":
            return None, None
        case "all_gather" | "gather":
            return one, all_blocks if at_root else None
        case "reduce_scatter" | "scatter":
            return all_blocks if at_root else None, one
        case "all_to_all":
            return all_blocks, all_blocks
        case "all_to_all_v":
            matrix = counts_matrix(work)
            return (sum(matrix[rank]),), (sum(row[rank] for row in matrix),)
        case "reduce":
            return one, one if at_root else None
        case _:
            return one, one


def x_of(work: Work, rank: int) -> Array:
    """Returns a rank's input, flat. Requires: the rank has one."""
    shape = shapes(work, rank)[0]
    assert shape is not None
    op = (work.case.op or "move") if work.tame else None
    return data(work.case.dtype, rank, work.case.ranks, work.offset, prod(shape), op)


@dataclass(frozen=True)
class Expected:
    values: Array
    allowed: tuple[Array, Array] | None = None


def out_of(work: Work, rank: int) -> Expected:
    """Returns a rank's output, flat. Requires: the rank gets one."""
    case, n, count = work.case, work.case.ranks, work.count
    everyone = range(n)
    mine = slice(rank * count, (rank + 1) * count)
    match case.collective:
        case "all_reduce" | "reduce":
            return _combined(work)
        case "reduce_scatter":
            whole = _combined(work)
            allowed = whole.allowed and (whole.allowed[0][mine], whole.allowed[1][mine])
            return Expected(whole.values[mine], allowed)
        case "broadcast":
            return Expected(x_of(work, case.root or 0))
        case "scatter":
            return Expected(x_of(work, case.root or 0)[mine])
        case "all_gather" | "gather":
            return Expected(np.concatenate([x_of(work, r) for r in everyone]))
        case "all_to_all":
            return Expected(np.concatenate([x_of(work, r)[mine] for r in everyone]))
        case "all_to_all_v":
            parts = []
            for r, row in enumerate(counts_matrix(work)):
                begin = sum(row[:rank])
                parts.append(x_of(work, r)[begin : begin + row[rank]])
            return Expected(np.concatenate(parts))
        case _:
            return Expected(x_of(work, (rank - 1) % n))


def _combined(work: Work) -> Expected:
    case = work.case
    elements = work.count * (case.ranks if case.collective in BLOCKED else 1)
    with _combining:
        return _combination(case.dtype, str(case.op), case.ranks, work.offset, elements, work.tame)


_combining = threading.Lock()  # the first of several threads makes the sum, the others find it


@lru_cache(4096)
def _combination(dtype: str, op: str, ranks: int, offset: int, elements: int, tame: bool) -> Expected:
    blocks = [data(dtype, rank, ranks, offset, elements, op if tame else None) for rank in range(ranks)]
    loose = tame and dtype not in INTEGERS and op in ("sum", "prod", "avg")
    return Expected(combine(blocks, op), bound(blocks, op) if loose else None)
