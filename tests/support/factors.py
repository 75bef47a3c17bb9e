"""Premultiplied sums in plain numpy, and a program of ranks that compares calls with them."""

from __future__ import annotations

from typing import Any

import numpy as np

import unisono
from reference import combine, data, difference

DTYPES = ("f32", "f64", "f16", "bf16")
FACTORS = (0.1, 1.0, -2.5, 1 / 3, 3e-5, 0.0, 7e4)  # of ranks; 1.0: none


def scaled(x: Any, factor: float) -> Any:
    """Returns x times the factor: multiplied in f32 (f64: in f64), and rounded to its dtype."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        return (x.astype(wide) * wide(factor)).astype(x.dtype)


def program() -> list[str]:
    """Returns what differs from the reference, on this rank."""
    wrong = []
    with unisono.init(timeout_s=60, check=True) as comm:
        n, me = comm.size, comm.rank
        for dtype in DTYPES:
            for count in (0, 1, 1001, 400_009):  # the last is large enough for the ways of large calls
                xs = [data(dtype, rank, n, 0, n * count) for rank in range(n)]
                wanted = combine([scaled(x, FACTORS[rank]) for rank, x in enumerate(xs)], "sum")
                x = xs[me].copy()
                total = comm.all_reduce(x, factor=FACTORS[me])
                at_root = comm.reduce(x, n - 1, factor=FACTORS[me])
                part = comm.reduce_scatter(x.reshape(n, -1), factor=FACTORS[me])
                if difference(x, xs[me]):
                    wrong.append(f"a call has changed its input, {dtype} {count}")
                comm.all_reduce(x, out=x, factor=FACTORS[me])
                mine = wanted[me * count : (me + 1) * count]
                for name, got, right in (
                    ("all_reduce", total, wanted),
                    ("all_reduce in place", x, wanted),
                    ("reduce", wanted if me != n - 1 else at_root, wanted),
                    ("reduce_scatter", part, mine),
                ):
                    if found := difference(got, right):
                        wrong.append(f"{name} of {count} {dtype}: {found}")
    return wrong
