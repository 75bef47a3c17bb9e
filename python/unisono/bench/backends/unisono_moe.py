"""Mixture of experts by Unisono: one Moe for all cases that differ in the number of tokens only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.bench import routes
from unisono.bench.backends.base import Buffers, MoeCalls
from unisono.records import Case
from unisono.records.vocabulary import DTYPES

LEAST_HANDLES = 4  # the library's default


class Moes:
    """The Moes of a run. A combine alone keeps its routing while other cases dispatch. Such cases therefore
    have a Moe of their own, with a handle for each.

    Args:
        asarray: returns an array of numpy as one of the run's device.
        queued: further arguments of a call on a GPU.
    """

    def __init__(self, comm: Any, asarray: Callable[[Any], Any], queued: Mapping[str, Any]) -> None:
        self.queued = queued
        self._comm, self._asarray = comm, asarray
        self._expected: dict[object, list[Case]] = defaultdict(list)
        self._made: dict[object, Any] = {}
        self._handles: dict[object, Any] = {}

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
            layout=moe.layout, capacity=max(most, 1), handles=max(LEAST_HANDLES, len({*map(_routed, cases)}))
        )
        tokens = max(routes.shape(case).tokens for case in cases)
        return self._comm.moe(
            moe.experts, moe.top_k, moe.hidden, tokens, dtype=DTYPES[cases[0].dtype], options=options
        )

    def routes(self, case: Case) -> tuple[Any, Any]:
        """Returns this rank's experts and weights of a case, on the device."""
        found, rank = routes.of(case), self._comm.rank
        return self._asarray(found.experts[rank].copy()), self._asarray(found.weights[rank].copy())

    def handle(self, case: Case, tokens: Any) -> Any:
        """Returns the handle of the case's routes, which `tokens` take the first time. Then collective."""
        key = _routed(case)
        if key not in self._handles:
            idx, weights = self.routes(case)
            d = self.of(case).dispatch(
                tokens, idx, weights, max_tokens=routes.shape(case).tokens, **self.queued
            )
            self._handles[key] = d.handle
        return self._handles[key]

    def close(self) -> None:
        """Frees the Moes, before their communicator is closed."""
        self._handles.clear()
        self._made.clear()


def _routed(case: Case) -> object:
    """Returns what decides the routing of a combine, which all modes of a case share, also that of checks."""
    return _key(case), case.moe


def _key(case: Case) -> object:
    moe = routes.shape(case)
    return case.collective == "moe_combine", moe.experts, moe.top_k, moe.hidden, moe.layout, case.dtype


class UnisonoMoe(MoeCalls):
    """The calls of one case."""

    def __init__(self, moes: Moes, case: Case, buffers: Buffers) -> None:
        self._moes, self._case, self._moe = moes, case, moes.of(case)
        self._x, self._out, self._queued = buffers.x, buffers.out, moes.queued
        self._tokens = routes.shape(case).tokens
        self._idx, self._weights = moes.routes(case)
        self._given = case.collective == "moe_combine"
        self._last: Any = None

    def route(self) -> None:
        self._handle = self._moes.handle(self._case, self._out)

    def dispatch(self) -> None:
        self._last = self._moe.dispatch(
            self._x, self._idx, self._weights, max_tokens=self._tokens, **self._queued
        )

    def combine(self) -> None:
        y, handle = (self._x, self._handle) if self._given else (self._last.x, self._last.handle)
        self._moe.combine(y, handle, out=self._out, **self._queued)

    def received(self) -> Any:
        return self._last.x[: int(self._last.rows)]
