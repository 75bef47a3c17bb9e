"""Matmuls with their collective by each library: Unisono's one call; torch.mm and a collective in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from unisono.bench.backends.base import Buffers, ResultCall
from unisono.bench.matmul import GATHER, Arrays, arrays, shape
from unisono.records import Case
from unisono.records.vocabulary import MATMUL, MATMULS

Call = Callable[[], object]


def lacking(case: Case) -> str | None:
    """Returns why the case cannot be made here, or None."""
    return None if find_spec("torch") else f"{case.collective} is torch's matmul: pip install torch."


def uneven(case: Case) -> str | None:
    """Returns why a library whose collectives have equal shares cannot make the case, or None."""
    m, collective = shape(case).m, MATMULS.get(case.collective)
    if collective in (None, "all_reduce") or m % case.ranks == 0:
        return None
    return f"its {collective} has equal shares, and {m} rows have none of {case.ranks} ranks."


def tensors(case: Case, rank: int, buffers: Buffers, tensor: Callable[[Any, Case], Any]) -> Arrays:
    """Returns the arrays of a case as matrices of torch. `tensor` returns an array of a case as a flat tensor
    on the same memory."""
    return arrays(case, rank, tensor(buffers.x, case), tensor(buffers.out, case))


def alone(of: Arrays) -> Call:
    """Returns the matmul alone."""
    import torch

    return partial(torch.mm, of.a, of.b, out=of.out)


def returned(call: Callable[[], Any], out: Any) -> ResultCall:
    """Returns a call whose result is a tensor of its own, which the checks alone copy to `out`."""
    last: Any = None

    def kept() -> None:
        nonlocal last
        last = None  # the next result may lie where this one does
        last = call()

    def keep() -> None:
        out.copy_(last)

    return ResultCall(kept, keep)


def by_unisono(comm: Any, case: Case, of: Arrays, chunks: int | None) -> Call:
    """Returns Unisono's call. chunks: None: as planned."""
    import unisono.torch as ut

    a, b, out = of
    match case.collective:
        case "matmul":
            return alone(of)
        case "all_gather_matmul":
            whole = partial(ut.fused_all_gather_matmul, gathered=shape(case).m, return_A=False, chunks=chunks)
            return returned(lambda: whole(comm, a, [b])[1][0], out)
        case "matmul_reduce_scatter":
            return returned(partial(ut.fused_matmul_reduce_scatter, comm, a, b, chunks=chunks), out)
        case _:
            return returned(partial(ut.matmul_all_reduce, comm, a, b, chunks=chunks), out)


@dataclass(frozen=True)
class Collectives:
    """How a library binds its collectives to tensors: (whole, part), (part, whole), and one in place."""

    all_gather: Callable[[Any, Any], Call]
    reduce_scatter: Callable[[Any, Any], Call]
    all_reduce: Callable[[Any], Call]


def by_torch(case: Case, of: Arrays, library: Collectives) -> Call:
    """Returns torch.mm and the library's collective, one after the other, in memory made beforehand."""
    import torch

    a, b, out = of
    if case.collective == MATMUL:
        return alone(of)
    if case.collective == GATHER:
        whole = a.new_empty(shape(case).m, shape(case).k)
        return _in_turn(library.all_gather(whole, a), partial(torch.mm, whole, b, out=out))
    if case.collective == "matmul_all_reduce":
        return _in_turn(alone(of), library.all_reduce(out))
    product = out.new_empty(shape(case).m, shape(case).n)
    return _in_turn(partial(torch.mm, a, b, out=product), library.reduce_scatter(out, product))


def _in_turn(first: Call, second: Call) -> Call:
    def call() -> None:
        first()
        second()

    return call
