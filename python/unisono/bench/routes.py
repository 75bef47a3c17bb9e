"""Routes of a mixture of experts, the same on every rank that asks: experts and weights of all ranks' tokens,
and the rows that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from unisono.records import Case, Moe

ZIPF_EXPONENT = 1.2
KEPT = 32  # routes: no more than a run needs at once

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Routes:
    """The experts and weights of all ranks' tokens, in rank order.

    A token's experts differ, and its weights sum to about 1.
    """

    experts: Ints  # [ranks, tokens, top_k]
    weights: Floats  # [ranks, tokens, top_k]
    homes: Ints  # [ranks, tokens, top_k]: the rank of each expert

    @property
    def sent(self) -> Ints:
        """Returns the rows that rank i sends to rank j: one for each token with an expert there."""
        ranks = range(len(self.homes))
        return np.stack([(self.homes == to).any(axis=2).sum(axis=1) for to in ranks], axis=1)


@lru_cache(maxsize=KEPT)
def routes(ranks: int, tokens: int, experts: int, top_k: int, routing: str, seed: int) -> Routes:
    """Returns the routes by seed.

    uniform: all experts are as likely. zipf: the r-th most wanted one by 1 / r^1.2, in an order by seed.
    one_hot: all tokens go to rank 0, to the first experts of an even draw, as far as its own suffice."""
    chosen, weights = np.empty((ranks, tokens, top_k), np.int64), np.empty((ranks, tokens, top_k), np.float32)
    allowed = np.random.default_rng([seed, ranks]).permutation(experts)
    if routing == "one_hot":
        allowed = np.arange(max(top_k, experts // ranks))
    steepness = ZIPF_EXPONENT if routing == "zipf" else 0.0
    likely = -steepness * np.log(np.arange(1, len(allowed) + 1))
    for rank in range(ranks):
        rng = np.random.default_rng([seed, ranks, rank])
        keys = likely + rng.gumbel(size=(tokens, len(allowed)))  # the largest are a draw without replacement
        chosen[rank] = allowed[np.argsort(-keys, axis=1, kind="stable")[:, :top_k]]
        drawn = 0.1 + rng.random((tokens, top_k), np.float32)
        weights[rank] = drawn / drawn.sum(axis=1, keepdims=True)
    return Routes(chosen, weights, chosen // (experts // ranks))


def shape(case: Case) -> Moe:
    """Returns the mixture of experts of a case that has one."""
    assert case.moe is not None
    return case.moe


def of(case: Case) -> Routes:
    """Returns the routes of a case."""
    moe = shape(case)
    return routes(case.ranks, moe.tokens, moe.experts, moe.top_k, moe.routing, moe.seed)


@dataclass(frozen=True)
class Rows:
    """The rows that one rank receives, in the layout's order."""

    source: Ints
    token: Ints
    place: Ints  # in the token's top k; flat: 0


@lru_cache(maxsize=KEPT)
def rows(case: Case, rank: int) -> Rows:
    """Returns the rows of a rank: by (expert, source rank, token), or flat by (source rank, token)."""
    moe, found = shape(case), of(case)
    if moe.layout == "flat":
        source, token = np.nonzero((found.homes == rank).any(axis=2))
        return Rows(source, token, np.zeros_like(token))
    source, token, place = np.nonzero(found.homes == rank)
    by_expert = np.argsort(found.experts[source, token, place], kind="stable")
    return Rows(source[by_expert], token[by_expert], place[by_expert])
