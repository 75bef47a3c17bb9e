"""The result of dispatch and combine in plain numpy. Shares no code with the library.

A `Layer` is what the calls of a Moe have in common, a `Tokens` one rank's part of a dispatch. All functions
take the parts of every rank and give what one rank gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from reference import Array

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = 128  # elements that share a scale
F32 = np.float32


@dataclass(frozen=True)
class Layer:
    ranks: int
    experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: str = "bf16"
    layout: str = "flat"
    alignment: int = 1
    scales: str | None = None
    capacity: int | None = None

    @property
    def local(self) -> int:
        return self.experts // self.ranks


@dataclass(frozen=True)
class Tokens:
    x: Array
    topk_idx: Array
    weights: Array | None = None
    more: tuple[Array, ...] = ()


@dataclass(frozen=True)
class Field:
    """The rows `at` of a received array, and the shape of all of it behind its rows."""

    values: Array
    at: Any = ...


@dataclass(frozen=True)
class Received:
    """The results of a dispatch at a rank. fields: by the names of MoeReceived; None: no such array."""

    fields: dict[str, Field | tuple[Field, ...] | None]
    rows: int
    dropped: int
    # source rank and token of each row, of a pair also its place, in the order of `at`
    pairs: Array
    at: Array = field(repr=False)  # the row of each
    lost: Array = field(repr=False)  # pairs (expert_major) or rows that were dropped


def quantised(x: Array, scales: str) -> tuple[Array, Array]:
    """Returns rows in e4m3, and their scales."""
    rows, hidden = x.shape
    blocks = -(-hidden // BLOCK)
    values = np.zeros((rows, blocks * BLOCK), F32)
    values[:, :hidden] = x.astype(F32)
    values = values.reshape(rows, blocks, BLOCK)
    with np.errstate(all="ignore"):
        largest = np.abs(values).max(axis=2)
        bad = ~np.isfinite(values).all(axis=2)
        largest = np.where(bad, F32(1), np.maximum(largest, F32(1e-4)))
        scale = (largest / F32(448)).astype(F32)
        if scales == "mx":
            exponents = (scale.view(np.uint32) + np.uint32(0x7FFFFF)) >> 23
            factor = np.ldexp(F32(1), 127 - exponents.astype(np.int32)).astype(F32)
            kept = np.where(bad, 255, exponents).astype(np.uint8)
            kept = np.pad(kept, ((0, 0), (0, -blocks % 4)))
        else:
            factor = (F32(448) / largest).astype(F32)
            kept = np.where(bad, np.uint32(0x7FC00000), scale.view(np.uint32)).view(F32)
        small = (values * factor[:, :, None]).astype(E4M3)
    small = np.where(bad[:, :, None], np.uint8(0x7F), small.view(np.uint8)).reshape(rows, blocks * BLOCK)
    return np.ascontiguousarray(small[:, :hidden]).view(E4M3), kept


def _pairs(layer: Layer, parts: Sequence[Tokens], rank: int) -> Array:
    """Returns (source, token, place, expert of this rank) of each pair that comes to a rank, by the first
    three."""
    found = []
    for source, part in enumerate(parts):
        local = part.topk_idx.astype(np.int64) - rank * layer.local
        token, place = np.nonzero((local >= 0) & (local < layer.local) & (part.topk_idx >= 0))
        found.append(np.stack([np.full_like(token, source), token, place, local[token, place]], axis=1))
    return np.concatenate(found)


def _taken(parts: Sequence[Array], pairs: Array) -> Array:
    """Returns the row of each (source, token)."""
    empty = parts[0][:0]
    return np.concatenate([empty, *(parts[source][token : token + 1] for source, token in pairs[:, :2])])


def _count(values: Array, bins: int) -> Array:
    return np.bincount(values, minlength=bins).astype(np.int32)


def _ends(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def received(layer: Layer, parts: Sequence[Tokens], rank: int, rows_held: int) -> Received:
    """Returns what the rank gets. rows_held: of its arrays."""
    weighted = any(part.weights is not None for part in parts)
    major = layer.layout == "expert_major"
    found = (_expert_major if major else _by_token)(layer, parts, rank, rows_held, weighted)
    kept, at = found.pairs, found.at
    rows = found.rows
    # expert_major: up to `rows`, with the gaps; else the rows that a token fills
    filled = slice(rows) if major else at

    def field_of(sources: Sequence[Array]) -> Field:
        values = _taken(sources, kept)
        if not major:
            return Field(values, filled)
        spread = np.zeros((rows, *values.shape[1:]), values.dtype)
        spread[at] = values
        return Field(spread, filled)

    if layer.scales is None:
        found.fields["x"], found.fields["scales"] = field_of([part.x for part in parts]), None
    else:
        small = [quantised(part.x, layer.scales) for part in parts]
        found.fields["x"] = field_of([one for one, _ in small])
        found.fields["scales"] = field_of([one for _, one in small])
    found.fields["more"] = tuple(
        field_of([part.more[i] for part in parts]) for i in range(len(parts[0].more))
    )
    found.fields["rows"] = Field(np.array(rows, np.int32))
    found.fields["dropped"] = Field(np.array(found.dropped, np.int32))
    return found


def _expert_major(
    layer: Layer, parts: Sequence[Tokens], rank: int, rows_held: int, weighted: bool
) -> Received:
    pairs = _pairs(layer, parts, rank)
    pairs = pairs[np.argsort(pairs[:, 3], kind="stable")]
    experts = pairs[:, 3]
    offsets, position = [0], np.zeros(len(pairs), np.int64)
    for expert in range(layer.local):
        mine = experts == expert
        position[mine] = offsets[-1] + np.arange(mine.sum())
        offsets.append(-(-(offsets[-1] + int(mine.sum())) // layer.alignment) * layer.alignment)
    most = offsets[-1] if layer.capacity is None else layer.capacity
    fits = position < most
    kept, at = pairs[fits], position[fits]
    row_expert = np.full(rows_held, -1, np.int32)
    row_expert[at] = experts[fits]
    ends = np.minimum(offsets, most).astype(np.int32)
    fields: dict[str, Field | tuple[Field, ...] | None] = {
        "topk_idx": None,
        "topk_weights": None,
        "expert_rows": None,
        "counts": Field(_count(experts[fits], layer.local)),
        "offsets": Field(ends),
        "source_rows": Field(_count(np.unique(pairs[:, :2], axis=0)[:, 0], layer.ranks)),
        "row_expert": Field(row_expert),
    }
    if weighted:
        weights = np.zeros(ends[-1], F32)
        weights[at] = [_weight(parts, pair) for pair in kept]
        fields["topk_weights"] = Field(weights, slice(int(ends[-1])))
    return Received(fields, int(ends[-1]), int((~fits).sum()), kept, at, pairs[~fits])


def _weight(parts: Sequence[Tokens], pair: Array) -> Any:
    weights = parts[pair[0]].weights
    assert weights is not None
    return weights[pair[1], pair[2]]


def _by_token(layer: Layer, parts: Sequence[Tokens], rank: int, rows_held: int, weighted: bool) -> Received:
    pairs = _pairs(layer, parts, rank)
    tokens = np.unique(pairs[:, :2], axis=0)  # sorted by source and token
    by_source = _count(tokens[:, 0], layer.ranks)
    within = np.arange(len(tokens)) - _ends(by_source)[tokens[:, 0]]
    at = tokens[:, 0] * layer.max_tokens + within if layer.layout == "rank_major" else np.arange(len(tokens))
    fits = at < (rows_held if layer.capacity is None else layer.capacity)
    kept, lost, at = tokens[fits], tokens[~fits], at[fits]
    full_idx = np.full((rows_held, layer.top_k), -1, np.int32)
    full_weights = np.zeros((rows_held, layer.top_k), F32)
    row_of = {tuple(token): row for token, row in zip(kept.tolist(), at.tolist(), strict=True)}
    by_expert = []
    for source, token, place, expert in pairs.tolist():
        if (row := row_of.get((source, token))) is not None:
            full_idx[row, place] = expert
            weights = parts[source].weights
            full_weights[row, place] = 0 if weights is None else weights[token, place]
            by_expert.append((expert, row))
    order = np.array(by_expert, np.int64).reshape(-1, 2)
    order = order[np.argsort(order[:, 0], kind="stable")]
    counts = _count(order[:, 0], layer.local)
    seen: Any = ... if layer.layout == "rank_major" else slice(len(at))
    rows = int(at[-1]) + 1 if len(at) else 0
    fields: dict[str, Field | tuple[Field, ...] | None] = {
        "topk_idx": Field(full_idx[seen], seen),
        "topk_weights": Field(full_weights[seen], seen) if weighted else None,
        "counts": Field(counts),
        "offsets": Field(_ends(counts)),
        "source_rows": Field(_count(kept[:, 0], layer.ranks)),
        "expert_rows": Field(order[:, 1].astype(np.int32), slice(len(order))),
        "row_expert": None,
    }
    return Received(fields, rows, len(lost), kept, at, lost)


def combined(
    layer: Layer,
    parts: Sequence[Tokens],
    rank: int,
    all_received: Sequence[Received],
    ys: Sequence[Array],
    weights: Sequence[Array] | None = None,
    bias: Array | None = None,
) -> Array:
    """Returns what a combine gives the rank.

    ys, weights: of each rank, a row for each received row. weights None: those that were dispatched, if any.
    """
    kind, width = ys[0].dtype, ys[0].shape[1]
    out = np.zeros((len(parts[rank].x), width), kind)
    weighted = weights is not None or any(part.weights is not None for part in parts)
    with np.errstate(all="ignore"):
        for token in range(len(out)):
            sums = []
            for r, came in enumerate(all_received):
                mine = np.flatnonzero((came.pairs[:, 0] == rank) & (came.pairs[:, 1] == token))
                lost = ((came.lost[:, 0] == rank) & (came.lost[:, 1] == token)).any()
                if layer.layout != "expert_major":
                    sums += [ys[r][came.at[one]] for one in mine]
                elif len(mine):
                    total = None
                    for one in mine[np.argsort(came.pairs[mine, 2], kind="stable")]:
                        row = came.at[one]
                        term = ys[r][row].astype(F32)
                        if weighted:
                            w = weights[r][row] if weights is not None else _weight(parts, came.pairs[one])
                            term = (F32(w) * term).astype(F32)
                        total = term if total is None else total + term
                    sums.append(total.astype(kind))
                elif lost:
                    sums.append(np.zeros(width, kind))
            if not sums:
                out[token] = 0 if bias is None else bias[token]
            elif len(sums) == 1 and bias is None:
                out[token] = sums[0]
            else:
                total = sums[0].astype(F32)
                for one in sums[1:]:
                    total = total + one.astype(F32)
                out[token] = (total if bias is None else total + bias[token].astype(F32)).astype(kind)
    return out
