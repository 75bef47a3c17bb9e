"""Makes the cases of a bench run: sizes, buffers' shapes, and the grid of all that is asked for.

`bytes` of a case is the size of the larger buffer on the busiest rank, as in nccl-tests, so that algbw =
bytes / time.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from unisono import traits
from unisono.bench import matmul, pairs, routes
from unisono.records import Case, vocabulary
from unisono.records.vocabulary import (
    DEVICES,
    DTYPES,
    INPUTS,
    KNOWN,
    MATMUL,
    MATMULS,
    MEMORIES,
    MODES,
    MOES,
    NORM,
    OPS,
    OWN,
    PATTERNS,
    PINGPONG,
    PLACEMENTS,
    modes_of,
)

# The length of a queue on GPUs: calls of CALL_US + bytes / GPU_BYTES_PER_US each that together last GRAPH_US.
GRAPH_US, CALL_US, GPU_BYTES_PER_US = 1000.0, 5.0, 300e3
FEWEST_CALLS, MOST_CALLS = 4, 200
FLOP_PER_US = 500e6  # of a matmul on GPUs
MOE_BUFFERS = 3  # times as much memory as other cases: libraries have memory of their own for what comes
SHAPED = (*MOES, NORM, *MATMULS, MATMUL)  # cases with more than a size, which have a grid of their own


class CaseError(ValueError):
    """The bench does not know a collective, size, dtype or the like, or cannot do what the user asked for.
    The message says what to do, and lists the known names."""


def _known(kind: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    if name not in names:
        raise CaseError(f"unknown {kind} {name!r}: choose from {', '.join(names)}.")
    return name


def split_names(kind: str, text: str, known: Sequence[str]) -> list[str]:
    """Returns the names in `"a,b"` without repeats, all known names for `"all"`. Raises CaseError."""
    if text.strip() == "all":
        return list(known)
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise CaseError(f"no {kind} given: choose from {', '.join(known)}.")
    return list(dict.fromkeys(_known(kind, name, known) for name in names))


_SIZE = re.compile(r"(\d+)([KMG]?)(?:I?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Returns the bytes of `8`, `64K`, `1M`, `2G` (powers of 1024, as in nccl-tests). Raises CaseError, also
    for 0."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise CaseError(
            f"size {text!r} is not understood: write bytes with an optional suffix, like 8, 64K, 1M or 2G."
        )
    scales = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    size = int(match[1]) * scales[match[2].upper()]
    if size == 0:
        raise CaseError(f"size {text!r}: it must be at least 1 byte.")
    return size


def size_range(begin: int, end: int, factor: int = 2, step: int | None = None) -> list[int]:
    """Returns begin, begin x factor, ... up to and including end; with `step`: begin, begin + step, ...
    Raises CaseError."""
    if begin < 1 or end < begin:
        raise CaseError(
            f"sizes from {begin} to {end} bytes: the first must be at least 1 and no larger than the last."
        )
    if step is not None:
        if step < 1:
            raise CaseError(f"step of {step} bytes: it must be at least 1.")
        return list(range(begin, end + 1, step))
    if factor < 2 and begin != end:
        raise CaseError(f"step factor {factor}: it must be at least 2.")
    sizes = [begin]
    while begin != end and sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return sizes


def all_to_all_v_blocks(block: int, ranks: int) -> list[int]:
    """Returns the elements that every rank sends to rank 0, 1, ...

    They rise evenly from a third of `block` for rank 0 to a whole block for the last rank, as if some experts
    were hot. From 64 elements a block on, they are whole rows of 8 elements, as tokens are."""
    if ranks == 1:
        return [block]
    row = 8 if block >= 8 * 8 else 1
    parts = [int(block * (ranks - 1 + 2 * to) / (3 * (ranks - 1))) // row * row for to in range(ranks - 1)]
    return [*parts, block]


def block_elements(case: Case) -> int:
    """Returns the elements of one rank's block for a blocked collective, of the whole buffer for others."""
    elements = case.bytes // DTYPES[case.dtype].itemsize
    return elements // case.ranks if KNOWN[case.collective].blocked else elements


def buffer_bytes(case: Case) -> int:
    """Returns the bytes of the largest buffer of the case on any rank."""
    if (case.moe, case.norm, case.matmul) == (None, None, None):
        return case.bytes
    layouts = [layout(case, rank) for rank in range(case.ranks)]
    shapes = [shape for one in layouts for shape in (one.x, one.out) if shape is not None]
    return max(math.prod(shape) for shape in shapes) * DTYPES[case.dtype].itemsize


def memory_bytes(case: Case) -> int:
    """Returns the size of a case without memory of the libraries that takes as much memory in all."""
    if case.matmul is not None:  # A of all ranks, and a product
        own = case.matmul.m * (case.matmul.k + case.matmul.n) * DTYPES[case.dtype].itemsize
        return buffer_bytes(case) + own
    return buffer_bytes(case) * (1 if case.moe is None else MOE_BUFFERS)


def has_in_place(case: Case) -> bool:
    """Returns whether the case has an in-place form. A collective built of sends and receives has none."""
    return KNOWN[case.collective].in_place and case.streams is None


@dataclass(frozen=True)
class Layout:
    """The shapes, in elements, of one rank's buffers, as the unisono API takes them. None: no such buffer."""

    x: tuple[int, ...] | None
    out: tuple[int, ...] | None
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()


def layout(case: Case, rank: int) -> Layout:
    """Returns the shapes of `x` and `out` of `case` on `rank`."""
    if case.collective in SHAPED:
        return _shaped(case, rank)
    n, block, at_root = case.ranks, block_elements(case), rank == case.root
    match case.collective:
        case "barrier":
            return Layout(None, None)
        case "all_gather":
            return Layout((block,), (n, block))
        case "gather":
            return Layout((block,), (n, block) if at_root else None)
        case "reduce_scatter":
            return Layout((n, block), (block,))
        case "scatter":
            return Layout((n, block) if at_root else None, (block,))
        case "all_to_all":
            return Layout((n, block), (n, block))
        case "all_to_all_v":
            to = all_to_all_v_blocks(block, n)
            return Layout((sum(to),), (n * to[rank],), tuple(to), (to[rank],) * n)
        case "reduce":
            return Layout((block,), (block,) if at_root else None)
        case vocabulary.PINGPONG:
            return Layout(
                (block,) if pairs.sends(case, rank) else None,
                (block,) if pairs.receives(case, rank) else None,
            )
        case _:
            return Layout((block,), (block,))


def _shaped(case: Case, rank: int) -> Layout:
    """Returns the layout of a case of SHAPED."""
    if case.matmul is not None:
        k, n = case.matmul.k, case.matmul.n
        return Layout((matmul.rows_in(case, rank) * k + k * n,), (matmul.rows_out(case, rank) * n,))
    if case.norm is not None:
        rows, hidden = case.norm.rows, case.norm.hidden
        # x, the residual and the weight; the normalised rows and the sum with the residual
        return Layout((2 * rows + 1, hidden), (2 * rows, hidden))
    moe = routes.shape(case)
    tokens, received = (moe.tokens, moe.hidden), (len(routes.rows(case, rank).token), moe.hidden)
    # the library's own memory has the rows of a dispatch
    x = received if case.collective == "moe_combine" else tokens
    return Layout(x, None if case.collective == "moe_dispatch" else tokens)


def make_case(
    collective: str,
    nominal_bytes: int,
    dtype: str,
    ranks: int,
    op: str | None = "sum",
    placement: str = "out_of_place",
    memory: str = "plain",
    mode: str = "latency",
    device: str = "cpu",
    offset: int = 0,
    inputs: str = "kept",
) -> Case:
    """Returns the case nearest below `nominal_bytes`, with at least one element a block.

    All elements are whole, and the blocks of a blocked collective equal. Only reductions keep `op`. The root
    is rank 0. Raises CaseError for an unknown name, for an op that the dtype lacks on that device, and for an
    offset at which no element of the dtype begins."""
    known = KNOWN[_known("collective", collective, [name for name in KNOWN if name not in SHAPED])]
    item = DTYPES[_known("dtype", dtype, DTYPES)].itemsize
    _known("placement", placement, PLACEMENTS)
    _known("memory", memory, MEMORIES)
    _known("inputs", inputs, INPUTS)
    _known("device", device, DEVICES)
    _known("mode", mode, modes_of(device))
    if known.reduces and not traits.has_op(dtype, _known("op", str(op), OPS), device == "cuda"):
        raise CaseError(f"there is no {op} of {dtype} on {device}: choose another --op or --dtype.")
    if offset % item:
        raise CaseError(f"--offset {offset}: {dtype} begins at multiples of its {item} bytes; choose one.")
    unit = item * ranks if known.blocked else item
    if collective == "barrier":
        dtype, size, offset, inputs = "u8", 0, 0, "kept"
    else:
        size = max(1, nominal_bytes // unit) * unit
    return Case(
        collective=collective,
        bytes=size,
        dtype=dtype,
        op=op if known.reduces else None,
        ranks=ranks,
        root=0 if known.rooted else None,
        placement=placement if known.in_place else "out_of_place",
        memory=memory if collective != "barrier" else "plain",
        offset=offset,
        inputs=inputs,
        mode=mode,
        device=device,
        pattern=PATTERNS[0] if collective == PINGPONG else None,
    )


def too_few(sizes: Sequence[int], dtypes: Sequence[str]) -> str | None:
    """Returns a sentence if any size is less than an element, so that `make_case` takes more; else None."""
    less = [f"{size} B of {name}" for name in dtypes for size in sizes if size < DTYPES[name].itemsize]
    if not less:
        return None
    return f"{', '.join(less)}: less than an element, so each collective's smallest case is measured."


def point_to_point(
    case: Case, patterns: Sequence[str], chosen: Sequence[pairs.Pair | None], streams: Sequence[str]
) -> list[Case]:
    """Returns a ping-pong in every pattern on every pair, an all_to_all in every way, other cases as is."""
    if case.collective == PINGPONG:
        product = itertools.product(chosen, patterns)
        return [msgspec.structs.replace(case, pair=pair, pattern=pattern) for pair, pattern in product]
    if case.collective != "all_to_all":
        return [case]
    ways = [msgspec.structs.replace(case, streams=None if way == OWN else way) for way in streams]
    return [way for way in ways if way.placement == "out_of_place" or has_in_place(way)]


def grid(
    ranks: int,
    collectives: Sequence[str],
    sizes: Sequence[int],
    dtypes: Sequence[str] = ("f32",),
    ops: Sequence[str] = ("sum",),
    placements: Sequence[str] = ("out_of_place",),
    memories: Sequence[str] = ("plain",),
    modes: Sequence[str] = MODES,
    device: str = "cpu",
    offsets: Sequence[int] = (0,),
    inputs: Sequence[str] = ("kept",),
) -> list[Case]:
    """Returns every distinct case of the product. Sizes that round to the same case count once, and dtypes go
    without the ops that they lack, unless all lack all."""
    product = itertools.product(collectives, sizes, dtypes, ops, placements, memories, offsets, inputs, modes)
    lacking = lacking_ops(dtypes, ops, device)
    return list(
        dict.fromkeys(
            make_case(name, size, dtype, ranks, op, placement, memory, mode, device, offset, written)
            for name, size, dtype, op, placement, memory, offset, written, mode in product
            if not (KNOWN[name].reduces and (dtype, op) in lacking)
        )
    )


def lacking_ops(dtypes: Sequence[str], ops: Sequence[str], device: str) -> set[tuple[str, str]]:
    """Returns the pairs of dtype and op that do not exist; none if all do not, which `make_case` refuses."""
    every = set(itertools.product(dtypes, ops))
    lacking = {(dtype, op) for dtype, op in every if not traits.has_op(dtype, op, device == "cuda")}
    return lacking if lacking != every else set()


def calls_per_sample(case: Case) -> int:
    """Returns the calls of one sample: 1 in the modes latency and events, else the length of the queue.

    The length is the same for every backend. On CPUs: 20 calls (as the iterations of nccl-tests), fewer if
    they would move more than 4 MiB, but at least 2. On GPUs, also in a graph: as many calls as last about a
    millisecond on a current link, from 200 for a few bytes down to 4."""
    if case.mode in ("latency", "events"):
        return 1
    if case.device == "cuda":
        of_matmul = 0 if case.matmul is None else matmul.flop(case) / FLOP_PER_US
        calls = math.ceil(GRAPH_US / (CALL_US + case.bytes / GPU_BYTES_PER_US + of_matmul))
        return min(MOST_CALLS, max(FEWEST_CALLS, calls))
    return min(20, max(2, (4 << 20) // max(1, case.bytes)))


Array = npt.NDArray[np.generic]
