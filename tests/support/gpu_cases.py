"""The collectives as the GPU tests call them, and the expected results by the contract's reference."""

from __future__ import annotations

from typing import Any

import numpy as np

import unisono
from gpus import Array, Gpus, numbers, random_bits
from reference import DTYPES, combine, difference
from unisono import traits

MOVING = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
ALL = ("all_reduce", "reduce", "reduce_scatter", *MOVING)


FEW = 8  # ranks; more have neither packets, lines nor copy engines


def plain_algorithms(collective: str, nvlink: bool, n: int = FEW) -> list[str | None]:
    """Returns the algorithms that take any pointer on `n` ranks, the plan's choice (None) first. nvlink:
    whether the GPUs have NVLink."""
    names = unisono.Communicator.algorithms(collective, "cuda")
    pieces = {"chunks"} if n > FEW else {"chunks", "packets", *(["lines"] if nvlink else [])}
    known = [traits.algorithm(name) for name in names]
    return [None, *(how.name for how in known if not how.direct and how.pieces in pieces)]


def direct_algorithms(collective: str, n: int) -> list[str]:
    known = unisono.Communicator.algorithms(collective, "cuda")
    names = [name for name in known if traits.algorithm(name).direct]
    if "copy_engine" in names and n > (2 if collective == "reduce" else FEW):
        names.remove("copy_engine")
    return names


def expected(collective: str, xs: list[Array], root: int, op: str) -> list[Array | None]:
    """Returns each rank's result for inputs `xs`; None: the rank gets none."""
    n = len(xs)
    at_root = lambda value: [value if r == root else None for r in range(n)]  # noqa: E731
    match collective:
        case "all_reduce":
            return [combine(xs, op)] * n
        case "reduce":
            return at_root(combine(xs, op))
        case "broadcast":
            return [xs[root]] * n
        case "all_gather":
            return [np.stack(xs)] * n
        case "gather":
            return at_root(np.stack(xs))
        case "reduce_scatter":
            return list(combine(xs, op))
        case "scatter":
            return list(xs[root])
        case "all_to_all":
            return [np.stack([x[r] for x in xs]) for r in range(n)]
    raise ValueError(collective)


def shapes(collective: str, count: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of a rank's input and output, the larger with about `count` elements."""
    block = count // n
    return {
        "all_reduce": ((count,), (count,)),
        "reduce": ((count,), (count,)),
        "broadcast": ((count,), (count,)),
        "all_gather": ((block,), (n, block)),
        "gather": ((block,), (n, block)),
        "reduce_scatter": ((n, block), (block,)),
        "scatter": ((n, block), (block,)),
        "all_to_all": ((n, block), (n, block)),
    }[collective]


def arguments(collective: str, op: str, root: int) -> dict[str, Any]:
    reduces = collective in ("all_reduce", "reduce", "reduce_scatter")
    rooted = collective in ("reduce", "broadcast", "gather", "scatter")
    return ({"op": op} if reduces else {}) | ({"root": root} if rooted else {})


def check(
    ranks: Gpus, collective: str, count: int, dtype: str, op: str, algorithm: str | None, pools: Any = None
) -> None:
    """Makes a call on ranks of this process, on random bits, and checks it. pools: symmetric memory."""
    n = ranks.n
    rng = np.random.default_rng(count + n)
    root = count % n
    x_shape, out_shape = shapes(collective, count, n)
    xs = [random_bits(rng, x_shape, dtype) for _ in range(n)]
    wanted = expected(collective, xs, root, op)
    inputs, outputs = [], []
    for r in range(n):
        x, out = ranks.put(xs[r], r), ranks.put(random_bits(rng, out_shape, dtype), r)
        if pools is not None:  # the same offsets of symmetric memory on every rank
            raw_x, raw_out = pools[0][r][: x.nbytes], pools[1][r][: out.nbytes]
            raw_x.copy_(x.view(-1).view(raw_x.dtype) if x.numel() else raw_x)
            x, out = ranks.view(raw_x, xs[r]), ranks.view(raw_out, np.empty(out_shape, DTYPES[dtype]))
        inputs.append(x)
        outputs.append(out)
    how = arguments(collective, op, root) | {"algorithm": algorithm}
    results = ranks.run(
        lambda comm, r, stream: getattr(comm, collective)(inputs[r], out=outputs[r], stream=stream, **how)
    )
    for r in range(n):
        if wanted[r] is not None:
            got = numbers(results[r], dtype)
            assert difference(got, wanted[r]) is None, (
                f"{collective} of {count} {dtype} by {algorithm}, rank {r} of {n}"
            )
