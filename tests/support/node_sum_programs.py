"""The programs of ranks in test_nodes.py that compare sums of many blocks with references."""

from __future__ import annotations

from itertools import product

import numpy as np

import quantised
import unisono
from fault_programs import attempt
from node_programs import layout
from reference import DTYPES, difference
from unisono.bench.backends.unisono import is_uniform

F32 = np.float32
SHARD_BYTES = 512 << 10  # the least bytes of a block for each rank (Limits of src/nodes/sums.hpp)


def long_sums(nodes: str) -> list[str]:
    """Makes sums of several blocks that no shard divides. Returns those that differ from a plain sum in rank
    order."""
    layout(nodes)
    comm = unisono.init(timeout_s=60, check=False)
    wrong = []
    block = SHARD_BYTES // F32().itemsize * comm.size
    for count in (2 * block + 1, 3 * block - 5):
        everyone = [
            np.random.default_rng((count, rank)).standard_normal(count, F32) for rank in range(comm.size)
        ]
        expected = everyone[0]
        for x in everyone[1:]:
            expected = expected + x
        for algorithm in ("one_shot", "two_shot", *(["chain"] if is_uniform(comm.nodes) else [])):
            for in_place in (False, True):
                x = everyone[comm.rank].copy()
                out = comm.all_reduce(x, algorithm=algorithm, out=x if in_place else None)
                wrong += [] if np.array_equal(out, expected) else [f"{algorithm} of {count}, {in_place=}"]
        for root, algorithm in product((0, comm.size - 1), ("one_shot", "two_shot")):
            x = everyone[comm.rank].copy()
            got = comm.reduce(x, root, out=x if root else None, algorithm=algorithm)
            right = comm.rank != root or np.array_equal(got, expected)
            wrong += [] if right else [f"reduce of {count} to {root} by {algorithm}"]
    comm.close()
    return wrong


def quantised_sums(nodes: str) -> list[str]:
    """Makes quantised sums of less than a block and of several, also in place. Returns those that differ from
    the definition."""
    layout(nodes)
    comm = unisono.init(timeout_s=60, check=True)
    wrong = []
    several = 2 * SHARD_BYTES // F32().itemsize * comm.size + 37
    for count in (0, 1, 31, 33, 1000, several):
        for dtype in quantised.DTYPES if count < several else ("f32", "bf16"):
            made = [np.random.default_rng((count, rank)).standard_normal(count) for rank in range(comm.size)]
            everyone = [(10 * one).astype(DTYPES[dtype]) for one in made]
            for wire in quantised.WIRES:
                for op in ("sum", "avg") if count < several else ("sum",):
                    expected, x = quantised.all_reduce(everyone, op, wire), everyone[comm.rank].copy()
                    for out in (np.empty_like(x), x):
                        comm.all_reduce(x, op, out=out, wire=wire)
                        if (text := difference(out, expected)) is not None:
                            wrong.append(f"{op} of {count} {dtype} as {wire}: {text}")
    other = "int8" if comm.rank == 0 else "fp8"
    error = attempt(lambda: comm.all_reduce(np.ones(8, F32), wire=other))["error"]["text"]
    same = "called all_reduce(sum) of 8 f32 as"
    differ = f"rank 0 {same} int8 by two_shot, but rank 1 {same} fp8 by two_shot: make"
    return wrong if differ in error else [*wrong, error]
