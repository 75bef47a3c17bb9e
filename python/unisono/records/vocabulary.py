"""The words of a case: collectives, dtypes, operations and modes, each named once for bench and report.

Bus bandwidth is algorithm bandwidth (`bytes` / time) times a factor: the share of `bytes` that must cross
the link of the busiest rank. The factors are those of nccl-tests (doc/PERFORMANCE.md and its sources).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import msgspec
import numpy as np

from .. import traits
from . import text
from .schema import Case, Matmul

DTYPES: dict[str, np.dtype[np.generic]] = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
}
INTEGERS = frozenset({"i8", "u8", "i32", "i64"})
OPS = tuple(traits.op_names())
PLACEMENTS = ("out_of_place", "in_place")
MEMORIES = ("plain", "symmetric")
INPUTS = ("kept", "written")  # before each call: as the last call left them; or written by their rank
DEVICES = ("cpu", "cuda")
# Forms in which unisono quantises an all_reduce, and the bits of an element on the wire.
WIRES = {"fp8": 8.25, "int8": 8.25}
OWN = "own"  # the library's own all_to_all
STREAMS = (OWN, "one", "per-peer")
MODES = ("latency", "throughput")
CUDA_MODES = ("graph", "events", "throughput", "latency")
PINGPONG = "pingpong"
PATTERNS = ("half_round_trip", "one_way", "bidirectional")  # of a ping-pong
HALVES = "halves"  # all pairs of a ping-pong at once, rank r with r + n/2
MOES = ("moe_dispatch", "moe_combine", "moe_round")
NORM = "all_reduce_rms_norm"
MATMULS = {  # matmuls with a collective, and that collective
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce",
}
MATMUL = "matmul"  # the same, and nothing is sent
QUANTS = ("none", "fp8_128")  # of its normalised rows
ROUTINGS = ("uniform", "zipf", "one_hot")
LAYOUTS = ("expert_major", "flat")


@dataclass(frozen=True)
class Collective:
    """A collective as the bench treats it. `blocked`: the larger buffer holds one block per rank."""

    name: str
    factor: Callable[[int], float]  # number of ranks -> bus bandwidth / algorithm bandwidth
    formula: str  # the factor in words, with n ranks
    reduces: bool = False
    rooted: bool = False
    blocked: bool = False
    in_place: bool = True


def _one(_ranks: int) -> float:
    return 1.0


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _collective(name: str, factor: Callable[[int], float], formula: str, in_place: bool = True) -> Collective:
    """Returns the row of a collective of the library, with properties from the core."""
    what = traits.collective(name)
    blocked = what.by_blocks or what.by_parts
    return Collective(name, factor, formula, what.combines, what.rooted, blocked, in_place)


def _all_twice(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


_SHARE = "(n-1)/n"

# In the order in which a reader wants them.
COLLECTIVES: dict[str, Collective] = {
    c.name: c
    for c in (
        _collective("all_reduce", _all_twice, f"2{_SHARE}"),
        _collective("reduce", _one, "1"),
        _collective("reduce_scatter", _all_but_own, _SHARE),
        _collective("all_gather", _all_but_own, _SHARE),
        _collective("gather", _all_but_own, _SHARE),
        _collective("broadcast", _one, "1"),
        _collective("scatter", _all_but_own, _SHARE),
        _collective("all_to_all", _all_but_own, _SHARE),
        # The busiest rank receives one full block from every rank: see all_to_all_v_blocks in bench/cases.py.
        _collective("all_to_all_v", _all_but_own, f"{_SHARE}, of the busiest rank's bytes", in_place=False),
        # A ring: every rank sends to the next one and receives from the one before.
        _collective("send_recv", _one, "1", in_place=False),
        _collective("barrier", lambda n: 0.0, "0, no data", in_place=False),
    )
}
# All that a run can measure. Unless the user names something, a run measures the collectives.
_MOE = "the share of its rows that come from other ranks, of each case"
KNOWN = {
    **COLLECTIVES,
    PINGPONG: Collective(PINGPONG, _one, "1, of one direction", in_place=False),
    **{name: Collective(name, _all_but_own, _MOE, in_place=False) for name in MOES},
    NORM: Collective(NORM, _all_twice, f"2{_SHARE}, of one rank's rows", in_place=False),
    **{
        name: Collective(name, COLLECTIVES[of].factor, f"{COLLECTIVES[of].formula}, as {of}", in_place=False)
        for name, of in MATMULS.items()
    },
    MATMUL: Collective(MATMUL, lambda n: 0.0, "0, nothing is sent", in_place=False),
}


def modes_of(device: str) -> tuple[str, ...]:
    """Returns the timing modes of a device, in a reader's order for GPUs."""
    return CUDA_MODES if device == "cuda" else MODES


def bus_factor(collective: str, ranks: int) -> float:
    """Returns bus bandwidth over algorithm bandwidth; 0 for a barrier, which moves no data."""
    return KNOWN[collective].factor(ranks)


def bus_factor_of(case: Case) -> float:
    """Returns the bus factor of a case. Of a mixture of experts its routes decide, not the ranks alone."""
    if case.moe is not None:
        return case.moe.remote_bytes / case.bytes if case.bytes else 0.0
    return bus_factor(case.collective, case.ranks)


def alone(case: Case) -> tuple[Case, Case]:
    """Returns the matmul alone and the collective alone that a matmul with its collective consists of. The
    collective has whole blocks."""
    assert case.matmul is not None
    of, item = COLLECTIVES[MATMULS[case.collective]], DTYPES[case.dtype].itemsize
    unit = item * case.ranks if of.blocked else item
    size = max(1, case.bytes // unit) * unit
    op = "sum" if of.reduces else None
    product = case.matmul.m * case.matmul.n * item
    return (
        msgspec.structs.replace(case, collective=MATMUL, bytes=product),
        msgspec.structs.replace(case, collective=of.name, bytes=size, op=op, matmul=None),
    )


def product_text(matmul: Matmul) -> str:
    """Returns the shape of a matmul: `8,192 × 8,192 × 2,048`, m, k and n."""  # noqa: RUF002
    return " × ".join(f"{extent:,}" for extent in (matmul.m, matmul.k, matmul.n))  # noqa: RUF001


def sends(case: Case) -> bool:
    """Returns whether a library is judged by the case: a matmul alone sends nothing."""
    return case.collective != MATMUL


def copy_factor_of(case: Case) -> float | None:
    """Returns what a copy of as much traffic would copy, over the case's bytes, if one rank alone permutes
    rows; None for other cases."""
    if case.moe is None or case.ranks > 1:
        return None
    return (1 + (case.moe.top_k if case.moe.layout == LAYOUTS[0] else 1)) / 2


def size_of(case: Case) -> int:
    """Returns what grows along the axis of sizes: bytes, or the tokens of a rank."""
    return case.bytes if case.moe is None else case.moe.tokens


def size_text(case: Case, size: int | None = None) -> str:
    """Returns the case's size, or another one of its kind, in words: `64 KiB`, `512 tokens`."""
    count = size_of(case) if size is None else size
    return text.size(count) if case.moe is None else text.count(count, "token")


def shape_text(case: Case) -> str | None:
    """Returns the shape of a mixture of experts: `top-8 of 256, hidden 2048`; None for other cases."""
    moe = case.moe
    return None if moe is None else f"top-{moe.top_k} of {moe.experts}, hidden {moe.hidden}"


def collective_order(name: str) -> tuple[int, str]:
    """Returns the sort key of a collective, or of a case's title: known collectives first, in their order."""
    name = name.partition(",")[0]
    known = list(KNOWN)
    return (known.index(name) if name in KNOWN else len(known), name)


def family(backend: str) -> str:
    """Returns a backend's name without its variant or installation: `unisono` of `unisono:two_shot` and of
    `unisono@before`."""
    return backend.partition(":")[0].partition("@")[0]


def title(case: Case) -> str:
    """Returns the collective, with a ping-pong's pattern, the sends that an all_to_all is built of, or what
    is unusual about the routes and rows of a mixture of experts, or the shape of a fused norm or matmul."""
    if case.matmul is not None:
        return f"{case.collective}, k {case.matmul.k}, n {case.matmul.n}"
    if case.norm is not None:
        quant = [case.norm.quant] if case.norm.quant != QUANTS[0] else []
        return ", ".join([case.collective, f"hidden {case.norm.hidden}", *quant])
    if case.moe is not None:
        unusual = [case.moe.routing.replace("_", " ")] if case.moe.routing != ROUTINGS[0] else []
        unusual += [f"{case.moe.layout} rows"] if case.moe.layout != LAYOUTS[0] else []
        return ", ".join([case.collective, *unusual])
    ways = {"one": "sends on one stream", "per-peer": "sends on a stream per peer"}
    how = str(case.pattern).replace("_", " ") if case.pattern else ways.get(case.streams or "")
    return f"{case.collective}, {how}" if how else case.collective


def pair_name(case: Case) -> str | None:
    """Returns the pair of a ping-pong: `0-3`, or `halves`; None for other cases."""
    if case.collective != PINGPONG:
        return None
    return HALVES if case.pair is None else "-".join(map(str, case.pair))


def scaling_text(case: Case) -> str | None:
    """Returns the scaling of a case: `weak, 64 KiB`; None for a case that is no point of a scaling."""
    return None if case.scaling is None else f"{case.scaling.kind}, {text.size(case.scaling.bytes)}"


def case_text(case: Case, workload: str | None = None) -> str:
    """Returns a case in words, without its defaults: `all_reduce 64 KiB f32 sum, 2 ranks, latency, plain`,
    `moe_round 512 tokens bf16, top-8 of 256, hidden 2048, 2 ranks, latency, plain`."""
    head = " ".join(part for part in (title(case), size_text(case), case.dtype, case.op) if part)
    shape = shape_text(case)
    extra = [*([shape] if shape else []), text.count(case.ranks, "rank"), case.mode, case.memory]
    if case.placement != "out_of_place":
        extra.append(case.placement.replace("_", " "))
    if case.offset:
        extra.append(f"offset {text.size(case.offset)}")
    if case.inputs != "kept":
        extra.append(f"inputs {case.inputs}")
    if case.collective == PINGPONG:
        extra.append(f"pair {pair_name(case)}")
    if case.scaling is not None:
        extra.append(f"scaling {scaling_text(case)}")
    if case.root:
        extra.append(f"root {case.root}")
    if case.device != "cpu":
        extra.append(case.device)
    if case.one_process:
        extra.append("one process")
    if workload:
        extra.append(f"workload {workload}")
    return ", ".join([head, *extra])
