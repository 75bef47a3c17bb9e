"""Calls across nodes that are made again and again, of which the later ones are played by the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import unisono
from fault_programs import attempt
from node_programs import F32, layout

ROUNDS = 5
USUAL = 2  # of which go through Python: one is noted, one is written down
HOW = ("new", "out", "in place")


class Case(NamedTuple):
    x: Any
    out: Any
    call: Callable[[Any, Any], Any]
    expected: Any  # None where this rank gets nothing


def repeated(nodes: str) -> dict[str, Any]:
    """Calls on other memory and data each time: which went wrong, and which were made in the usual way though
    they had been made often enough. Then what is said of wrong ones."""
    layout(nodes)
    comm = unisono.init(timeout_s=60, check=False)
    usual, make = [], comm._call
    comm._call = lambda name, *words, **more: usual.append(name) or make(name, *words, **more)
    rng = np.random.default_rng(5)  # the same everywhere: each rank knows what the others give
    wrong, late, kept = [], [], []
    for count in (1, 7, 1000, 40_000):
        for how in HOW:
            for turn in range(ROUNDS):
                given = rng.standard_normal((comm.size, comm.size, count)).astype(F32)
                for name, case in _cases(comm, given, how).items():
                    kept.append(case)  # the next has other memory
                    usual.clear()
                    got = case.call(case.x, case.out)
                    right = case.expected is None or np.array_equal(got, case.expected)
                    wrong += [] if right else [f"{name} of {count}, {how}, {turn}"]
                    late += usual if turn >= USUAL else []
    for turn in range(ROUNDS):
        usual.clear()
        comm.barrier()
        late += usual if turn >= USUAL else []
    x = np.ones(7, F32)  # of a call that is known
    said = {
        "shape": attempt(lambda: comm.all_reduce(x, out=np.ones(8, F32))),
        "dtype": attempt(lambda: comm.all_reduce(x, out=np.ones(7))),
        "op": attempt(lambda: comm.all_reduce(x, "median")),
        "algorithm": attempt(lambda: comm.all_reduce(x, algorithm="ring")),
    }
    np.testing.assert_array_equal(comm.all_reduce(x), np.full(7, comm.size, F32))
    comm.check = True
    said["checked"] = attempt(lambda: comm.all_reduce(x, "max" if comm.rank else "sum"))
    said["failed"] = attempt(lambda: comm.all_reduce(x))
    comm.close()
    said["closed"] = attempt(lambda: comm.all_reduce(x))
    return {"wrong": wrong, "late": late, "said": {word: one["error"]["text"] for word, one in said.items()}}


def _cases(comm: Any, given: Any, how: str) -> dict[str, Case]:
    """`given`: what each rank gives to each; what it gives to the first is also what it gives to all."""
    n, me, last = comm.size, comm.rank, comm.size - 1
    ahead, behind = (me + 1) % n, (me - 1) % n
    total, shard = given[0, 0], given[0, me]
    for its in given[1:]:
        total, shard = total + its[0], shard + its[me]

    def case(x: Any, call: Callable[[Any, Any], Any], expected: Any, in_place: Any) -> Case:
        out = None if expected is None or how == "new" else np.empty_like(expected)
        return Case(x, in_place if out is not None and how == "in place" else out, call, expected)

    def one() -> Any:
        return given[me, 0].copy()

    def ring(x: Any, out: Any) -> Any:
        if me % 2 == 0:
            comm.send(x, ahead)
        comm.recv(out, behind)
        if me % 2:
            comm.send(x, ahead)
        return out

    a, r, b, s = one(), one(), one() if me == last else np.zeros_like(one()), one()
    y, z, gathered, to_first = given[me].copy(), given[me].copy(), given[:, 0].copy(), given[:, 0].copy()
    to_each = given[me].copy() if me == 0 else None
    return {
        "all_reduce": case(a, lambda x, out: comm.all_reduce(x, out=out), total, a),
        "reduce": case(r, lambda x, out: comm.reduce(x, last, out=out), total if me == last else None, r),
        "reduce_scatter": case(y, lambda x, out: comm.reduce_scatter(x, out=out), shard, y[me]),
        "broadcast": case(b, lambda x, out: comm.broadcast(x, last, out=out), given[last, 0], b),
        "all_gather": case(gathered[me], lambda x, out: comm.all_gather(x, out=out), given[:, 0], gathered),
        "gather": case(
            to_first[me], lambda x, out: comm.gather(x, 0, out=out), None if me else given[:, 0], to_first
        ),
        "scatter": Case(to_each, np.zeros_like(a), lambda x, out: comm.scatter(x, 0, out=out), given[0, me]),
        "all_to_all": case(z, lambda x, out: comm.all_to_all(x, out=out), given[:, me], z),
        "send_recv": case(s, lambda x, out: comm.send_recv(x, ahead, out, behind), given[behind, 0], s),
        "send and recv": Case(one(), np.zeros_like(a), ring, given[behind, 0]),
        "to itself": case(s.copy(), lambda x, out: comm.send_recv(x, me, out, me), given[me, 0], None),
    }
