"""The matrix of the contract of mixture of experts: the kinds of layers, routes and data.

All functions of a `Job` are pure, so that every rank knows every rank's data without messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from moe_reference import Layer, Received, Tokens, combined, received
from reference import DTYPES, Array, data

LAYOUTS = ("flat", "rank_major", "expert_major")
FLOATS = ("f32", "f16", "bf16")
ROUTES = ("uniform", "zipf", "one_hot", "masked", "all_masked", "twice")
PRESENCE = ("uneven", "full", "some", "none")
HIDDENS = (128, 33, 200, 257, 1)
MORE: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] = (
    (),
    (("u8", (1,)),),
    (("i64", ()), ("bf16", (5, 3)), ("f8e4m3", (7,))),
)
GROUPS = ("layouts", "rows", "scales", "capacity", "alignment", "handles", "steps", "rounds")


@dataclass(frozen=True)
class Job:
    """Dispatch and combine of one layer. number: seeds what else is chosen."""

    group: str
    number: int
    layer: Layer
    route: str = "uniform"
    presence: str = "uneven"
    weights: str = "dispatch"  # at dispatch, at combine, both, or none
    drop: bool = False
    rows: tuple[str, int] | None = None  # dtype and width of x, if not the layer's

    @property
    def index(self) -> str:
        return ("i64", "i32")[self.number % 2]

    @property
    def more(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return MORE[self.number % 3]

    @property
    def more_bytes(self) -> int:
        return sum(DTYPES[dtype].itemsize * int(np.prod(shape)) for dtype, shape in self.more)

    @property
    def biased(self) -> bool:
        return self.number % 3 == 1

    @property
    def given(self) -> bool:
        """Returns whether the calls get outputs of the caller."""
        return self.number % 4 == 2

    @property
    def y_dtype(self) -> str:
        """Returns the dtype of y: mostly that of x, else another that is no wider."""
        other = {"f32": "f16", "f16": "bf16", "bf16": "f16"}[self.layer.dtype]
        return other if self.number % 5 == 4 else self.layer.dtype

    @property
    def width(self) -> int:
        return max(1, self.layer.hidden - self.number % 7) if self.number % 2 else self.layer.hidden

    @property
    def experts_weigh(self) -> bool:
        """Returns whether combine gets weights."""
        return self.layer.layout == "expert_major" and self.weights in ("combine", "both")

    def __str__(self) -> str:
        return (
            f"{self.group} {self.number}: {self.layer}, {self.route}, {self.presence} tokens, {self.weights}"
        )


def jobs(ranks: int) -> list[Job]:
    """Returns all jobs, in an order that every rank knows."""
    return list(_jobs(ranks))


def _jobs(ranks: int) -> Iterator[Job]:
    hidden, numbers = itertools.cycle(HIDDENS), itertools.count()

    def job(group: str, layout: str, dtype: str, route: str, drop: bool = False, **more: object) -> Job:
        number = next(numbers)
        each = (1, 2, 3)[(number + number // 6) % 3]
        layer = Layer(ranks, ranks * each, min(ranks * each, (2, 3, 1, 4)[number % 4]), next(hidden), 6)
        layer = replace(layer, layout=layout, dtype=dtype, **more)  # type: ignore[arg-type]
        how = ("dispatch", "combine", "none", "both")[number // 2 % 4]
        return Job(group, number, layer, route, PRESENCE[(number + number // 6) % 4], how, drop)

    for layout, dtype, (at, route) in itertools.product(LAYOUTS, FLOATS, enumerate(ROUTES)):
        if ranks <= 3 or dtype == FLOATS[at % len(FLOATS)]:
            yield job("layouts", layout, dtype, route)
    for layout in LAYOUTS:  # more pairs of a token than experts of a rank
        one = replace(job("layouts", layout, "f32", "twice"), presence="full")
        layer = replace(one.layer, experts=ranks, top_k=min(ranks, 3))
        if layout == "expert_major":
            layer = replace(layer, capacity=ranks * layer.max_tokens * layer.top_k)
        yield replace(one, layer=layer)
    for layout, part in itertools.product(LAYOUTS, range(4)):  # rows that are not of the layer's elements
        dtype, kind = (("bf16", "f8e4m3"), ("f32", "u8"), ("f16", "u8"), ("f32", "i32"))[part]
        one = job("rows", layout, dtype, "masked", alignment=4 if layout == "expert_major" else 1)
        hidden_bytes = one.layer.hidden * DTYPES[dtype].itemsize
        width = (one.layer.hidden, hidden_bytes, 1, (one.layer.hidden + 1) // 2)[part]
        yield replace(one, rows=(kind, width))
    for scales, layout, dtype in itertools.product(("e4m3_128", "mx"), LAYOUTS, FLOATS):
        yield job("scales", layout, dtype, "masked", scales=scales)
    for alignment, route, scales in itertools.product((4, 8), ("uniform", "masked"), (None, "mx")):
        yield job("alignment", "expert_major", "bf16", route, alignment=alignment, scales=scales)
    for layout, drop, route in itertools.product(("flat", "expert_major"), (False, True), ROUTES[:3]):
        for alignment in (1, 4) if layout == "expert_major" else (1,):
            whole = replace(job("capacity", layout, "f32", route, drop, alignment=alignment), presence="full")
            most = max(came.rows for came in received_by_all(whole, 0))
            yield replace(whole, layer=replace(whole.layer, capacity=max(1, most * 3 // 5 if drop else most)))
    for group, layout in itertools.product(("handles", "steps", "rounds"), LAYOUTS):
        yield job(group, layout, "bf16", "zipf")
        yield replace(job(group, layout, "f32", "masked", scales="e4m3_128"), presence="full")


def tokens_of(job: Job, rank: int) -> int:
    most = job.layer.max_tokens
    match job.presence:
        case "full":
            return most
        case "some":
            return most - rank if rank % 2 and rank < most else 0
        case "none":
            return 0
    return (3 * rank + job.number) % (most + 1)


def _routes(job: Job, rank: int, turn: int) -> Array:
    """Returns the experts of each token. turn: of several dispatches of a job."""
    layer, rng = job.layer, np.random.default_rng([job.number, rank, turn])
    shape = (tokens_of(job, rank), layer.top_k)
    idx = np.argsort(rng.random((shape[0], layer.experts)), axis=1)[:, : layer.top_k]
    match job.route:
        case "zipf":
            share = np.arange(1, layer.experts + 1) ** -1.2
            gumbel = rng.gumbel(size=(shape[0], layer.experts)) + np.log(share)
            idx = np.argsort(-gumbel, axis=1)[:, : layer.top_k]
        case "one_hot":
            idx = (np.arange(layer.top_k) + layer.experts // 2) % layer.experts + np.zeros(shape, int)
        case "masked":
            idx = np.where(rng.random(shape) < 0.4, -1, idx)
        case "all_masked":
            idx = np.full(shape, -1)
        case "twice":
            idx = np.where(rng.random(shape) < 0.5, idx[:, :1], idx)
    return idx.astype(DTYPES[job.index])


def _wild(job: Job, dtype: str, rank: int, shape: tuple[int, ...], *seed: int) -> Array:
    offset = sum(7919 ** (place + 1) * one for place, one in enumerate((job.number, *seed)))
    return data(dtype, rank, job.layer.ranks, offset % 20_011, int(np.prod(shape))).reshape(shape)


def _rows(job: Job, shape: tuple[int, int], seed: tuple[int, ...]) -> Array:
    """Returns rows of x: wild ones, or for scales those that mostly have finite blocks."""
    if job.rows is not None:
        dtype, width = job.rows
        return _wild(job, dtype, seed[1], (shape[0], width), seed[2])
    kind = DTYPES[job.layer.dtype]
    if job.layer.scales is None:
        return _wild(job, job.layer.dtype, seed[1], shape, seed[2])
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        rows = (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 15, (shape[0], 1)))).astype(kind)
    for row in range(0, shape[0], 4):
        rows[row, rng.integers(shape[1])] = rng.choice([0.0, -0.0, float("inf"), float("nan"), 3e4])
    rows[1::5] = 0
    return rows


@cache
def tokens(job: Job, rank: int, turn: int) -> Tokens:
    """Returns a rank's part of the job's dispatch. Later turns have other data and routes."""
    seed, n = (job.number, rank, turn), tokens_of(job, rank)
    weights = None
    if job.weights in ("dispatch", "both"):
        weights = np.random.default_rng(seed).standard_normal((n, job.layer.top_k)).astype(np.float32)
    more = tuple(
        _wild(job, dtype, rank, (n, *shape), turn, place) for place, (dtype, shape) in enumerate(job.more)
    )
    return Tokens(_rows(job, (n, job.layer.hidden), seed), _routes(job, rank, turn), weights, more)


def parts(job: Job, turn: int, routing: int | None = None) -> list[Tokens]:
    """Returns every rank's part. routing: the turn that the experts are of."""
    made = [tokens(job, rank, turn) for rank in range(job.layer.ranks)]
    if routing is None:
        return made
    of = [tokens(job, rank, routing) for rank in range(job.layer.ranks)]
    return [replace(one, topk_idx=old.topk_idx) for one, old in zip(made, of, strict=True)]


def rows_held(job: Job) -> int:
    layer = job.layer
    if layer.capacity is not None:
        return layer.capacity
    most = layer.ranks * layer.max_tokens
    if layer.layout == "expert_major":
        most = most * min(layer.top_k, layer.local) + layer.local * (layer.alignment - 1)
    return most


@cache
def received_by_all(job: Job, turn: int, routing: int | None = None) -> list[Received]:
    data = parts(job, turn, routing)
    return [received(job.layer, data, rank, rows_held(job)) for rank in range(job.layer.ranks)]


@cache
def outputs(job: Job, turn: int) -> list[Array]:
    """Returns y of every rank."""
    shape = (rows_held(job), job.width)
    return [_wild(job, job.y_dtype, rank, shape, turn, 9) for rank in range(job.layer.ranks)]


@cache
def late_weights(job: Job, turn: int) -> list[Array] | None:
    if not job.experts_weigh:
        return None
    rng = np.random.default_rng((job.number, turn, 10))
    return [rng.standard_normal(rows_held(job)).astype(np.float32) for _ in range(job.layer.ranks)]


@cache
def bias(job: Job, rank: int, turn: int) -> Array | None:
    if not job.biased:
        return None
    shape = (tokens_of(job, rank), job.width)
    return _wild(job, job.y_dtype, rank, shape, turn, 11)


@cache
def combined_by(job: Job, rank: int, turn: int, routing: int | None = None) -> Array:
    """Returns what a combine gives the rank."""
    came, ys = received_by_all(job, turn, routing), outputs(job, turn)
    return combined(
        job.layer, parts(job, turn, routing), rank, came, ys, late_weights(job, turn), bias(job, rank, turn)
    )
