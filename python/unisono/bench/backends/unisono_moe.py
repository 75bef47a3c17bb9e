"""Mixture of experts by Unisono: one Moe for all cases that differ in the number of tokens only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.bench import routes
from unisono.bench.backends.base import Buffers
from unisono.records import Case
from unisono.records.vocabulary import DTYPES

LEAST_HANDLES = 4  # the library's default


class Moes:
    """The Moes of a run. A combine alone keeps its routing while other cases dispatch. Such cases therefore
    have a Moe of their own, with a handle for each."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._expected: dict[object, list[Case]] = defaultdict(list)
        self._made: dict[object, Any] = {}
        self._handles: dict[Case, Any] = {}

    def expect(self, cases: Sequence[Case]) -> None:
        for case in cases:
            if case.moe is not None:
                self._expected[_key(case)].append(case)

    def of(self, case: Case) -> Any:
        """Returns the Moe of a case. Collective if it is the first of its kind."""
        key = _key(case)
        if key not in self._made:
            self._made[key] = self._make(self._expected[key] or [case])
        return self._made[key]

    def _make(self, cases: list[Case]) -> Any:
        import unisono

        moe = routes.shape(cases[0])
        most = max(len(routes.rows(case, rank).token) for case in cases for rank in range(case.ranks))
        options = unisono.MoeOptions(
            layout=moe.layout, capacity=max(most, 1), handles=max(LEAST_HANDLES, len(set(cases)))
        )
        tokens = max(routes.shape(case).tokens for case in cases)
        return self._comm.moe(
            moe.experts, moe.top_k, moe.hidden, tokens, dtype=DTYPES[cases[0].dtype], options=options
        )

    def handle(self, case: Case) -> Any:
        """Returns the handle of the case's routes, from a dispatch of zeros. Collective the first time."""
        if case not in self._handles:
            shape, found, rank = routes.shape(case), routes.of(case), self._comm.rank
            x = np.zeros((shape.tokens, shape.hidden), DTYPES[case.dtype])
            got = self.of(case).dispatch(x, found.experts[rank].copy(), found.weights[rank].copy())
            self._handles[case] = got.handle
        return self._handles[case]

    def close(self) -> None:
        """Frees the Moes, before their communicator is closed."""
        self._handles.clear()
        self._made.clear()


def _key(case: Case) -> object:
    moe = routes.shape(case)
    return case.collective == "moe_combine", moe.experts, moe.top_k, moe.hidden, moe.layout, case.dtype


class UnisonoMoe:
    """The calls of one case."""

    def __init__(self, moes: Moes, rank: int, case: Case, buffers: Buffers) -> None:
        found = routes.of(case)
        self._moes, self._case, self._moe = moes, case, moes.of(case)
        self._x, self._out = buffers.x, buffers.out
        self._idx, self._weights = found.experts[rank].copy(), found.weights[rank].copy()
        self._given = case.collective == "moe_combine"
        self._last: Any = None

    def route(self) -> None:
        self._handle = self._moes.handle(self._case)

    def dispatch(self) -> None:
        self._last = self._moe.dispatch(self._x, self._idx, self._weights)

    def combine(self) -> None:
        if self._given:
            self._moe.combine(self._x, self._handle, out=self._out)
        else:
            self._moe.combine(self._last.x, self._last.handle, out=self._out)

    def received(self) -> Any:
        return self._last.x[: int(self._last.rows)]
