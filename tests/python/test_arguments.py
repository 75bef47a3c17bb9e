"""Calls take their arguments alike by the short way (bindings/short_way.hpp) and by nanobind's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import unisono
from unisono import _core

F32 = np.float32
X = np.arange(4, dtype=F32)
Make = Callable[[Any], Any]


class Derived(unisono.Communicator):
    pass


@pytest.fixture(params=[unisono.Communicator, Derived])
def comm(request: pytest.FixtureRequest) -> Iterator[Any]:
    communicator = request.param(_core.thread_bootstraps(1, 20)[0])
    yield communicator
    communicator.close()


ALIKE: dict[str, Make] = {
    "places": lambda c: c.all_reduce(X, "sum", np.empty(4, F32), None, None, None, 1.0),
    "places of all": lambda c: c.all_reduce(X, "sum", None, None, None, None, 1.0, False, 20.0),
    "keywords": lambda c: c.all_reduce(factor=1, out=np.empty(4, F32), op="avg", x=X),
    "keywords of all": lambda c: c.all_reduce(x=X, timeout_s=20, asynchronous=False),
    "a keyword made now": lambda c: c.all_reduce(X, **{"".join(["o", "p"]): "max"}),
    "None": lambda c: c.all_reduce(X, out=None, algorithm=None, wire=None),
    "number of numpy": lambda c: c.broadcast(X, root=np.int64(0)),
    "begun": lambda c: c.all_reduce(X, asynchronous=True).wait(),
    "of the class": lambda c: unisono.Communicator.all_reduce(c, X),
    "method": lambda c: getattr(c, "all_reduce")(X),  # noqa: B009
    "pair": lambda c: c.send_recv(X, 0, None, src=0),
    "counts": lambda c: c.all_to_all_v(X, [4], recv_counts=[4]),
    "counts of a tuple and an array": lambda c: c.all_to_all_v(X, (4,), np.array([4])),
    "counts of any iterables": lambda c: c.all_to_all_v(X, iter([np.int32(4)]), {4: None}),
}


@pytest.mark.parametrize("form", ALIKE)
def test_every_form_of_a_call(form: str, comm: Any) -> None:
    assert (ALIKE[form](comm) == X).all()


REFUSED: dict[str, Make] = {
    "none": lambda c: c.all_reduce(),
    "too many": lambda c: c.all_reduce(X, "sum", None, None, None, None, 1.0, False, None, 1),
    "twice": lambda c: c.all_reduce(X, x=X),
    "twice, later": lambda c: c.all_reduce(X, "sum", op="sum"),
    "unknown": lambda c: c.all_reduce(X, outt=X),
    "x None": lambda c: c.all_reduce(None, out=X),
    "out left out": lambda c: c.send_recv(X, 0, src=0),
    "another type": lambda c: c.all_reduce(X, factor="1"),
    "no name": lambda c: c.all_reduce(X, algorithm=1),
    "to barrier": lambda c: c.barrier(1),
    "self None": lambda c: unisono.Communicator.all_reduce(None, X),
    "self of another type": lambda c: unisono.Communicator.all_reduce(1, X),
    "no self": lambda c: unisono.Communicator.barrier(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit(case: str, comm: Any) -> None:
    with pytest.raises(
        TypeError, match=r"(all_reduce|barrier|send_recv)\(\): incompatible function arguments"
    ):
        REFUSED[case](comm)


def test_calls_keep_no_argument(comm: Any) -> None:
    out, op, name = np.empty(4, F32), "".join(["s", "um"]), "".join(["two", "_shot"])

    def calls() -> None:
        comm.all_reduce(X, op, out=out, algorithm=name)
        comm.all_reduce(X, op)
        comm.broadcast(out, root=0)
        for wrong in (X[:2], None, out):
            with pytest.raises((TypeError, unisono.UsageError)):
                comm.all_reduce(X, out, wrong, outt=None) if wrong is None else comm.all_reduce(
                    X, name, out=wrong
                )

    def held() -> list[int]:
        return [sys.getrefcount(one) for one in (X, out, op, name, comm)]

    calls()
    before = held()
    for _ in range(100):
        calls()
    assert held() == before
