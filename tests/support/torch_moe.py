"""A mixture of experts in plain torch, on one process, and the data of its tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

HIDDEN, INNER = 12, 10


class Experts:
    """Weights of all experts, with gradients."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.first = torch.randn(number, HIDDEN, INNER, generator=generator).requires_grad_()
        self.second = torch.randn(number, INNER, HIDDEN, generator=generator).requires_grad_()

    def __call__(self, expert: int, x: Any) -> Any:
        return torch.tanh(x @ self.first[expert]) @ self.second[expert]


def batch(tokens: int, experts: int, top_k: int, seed: int, masked: bool) -> tuple[Any, Any, Any]:
    """Returns x, topk_idx and topk_weights. Experts may come twice in a row's top-k."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    idx = torch.randint(0, experts, (tokens, top_k), generator=generator)
    if masked:
        idx[torch.rand(tokens, top_k, generator=generator) < 0.3] = -1
    return x, idx, torch.rand(tokens, top_k, generator=generator) + 0.1


def reference(experts: Experts, x: Any, idx: Any, weights: Any) -> Any:
    """Returns the sum of a token's experts by its weights, pair by pair."""
    rows = []
    for token in range(len(x)):
        sums = torch.zeros(HIDDEN)
        for place, expert in enumerate(idx[token].tolist()):
            if expert >= 0:
                sums = sums + weights[token, place] * experts(expert, x[token])
        rows.append(sums)
    return torch.stack(rows) if rows else torch.zeros(0, HIDDEN) * x.sum() * weights.sum()


def by_rows(experts: Experts, first: int, received: Any) -> Any:
    """Runs a rank's experts on the rows of flat or rank_major: the weighted sum of each row's experts."""
    y = torch.zeros_like(received.x)
    for local in range(len(received.counts)):
        row, place = torch.where(received.topk_idx == local)
        if len(row):  # without a row y leaves the graph, as it may
            one = experts(first + local, received.x[row]) * received.topk_weights[row, place, None]
            y = y.index_add(0, row, one)
    return y


def by_experts(experts: Experts, first: int, received: Any) -> Any:
    """Runs a rank's experts on the rows of expert_major."""
    parts = []
    offsets = received.offsets.tolist()
    for local, (begin, end) in enumerate(pairwise(offsets)):
        parts.append(experts(first + local, received.x[begin:end]))
    return torch.cat(parts)


def gradients(loss: Any, inputs: Sequence[Any]) -> list[Any]:
    """Returns the gradient of each input, zeros if the loss does not depend on it."""
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(of) if one is None else one for one, of in zip(found, inputs, strict=True)]
