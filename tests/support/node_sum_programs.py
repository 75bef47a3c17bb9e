"""The programs of test_nodes.py that compare long sums and broadcasts, of many blocks, with references."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

import quantised
import unisono
from fault_programs import attempt
from node_programs import layout
from reference import DTYPES, combine, difference, wild
from unisono.nodes import chain, moves, shards, sums
from unisono.nodes.space import HostSpace

F32 = np.float32


def long_sums(nodes: str) -> list[str]:
    """Sums of several blocks that no shard divides: those that differ from a plain sum in rank order."""
    layout(nodes)
    comm = unisono.init(timeout_s=60, check=False)
    wrong = []
    block = shards.SHARD_BYTES // F32().itemsize * comm.size
    for count in (2 * block + 1, 3 * block - 5):
        everyone = [
            np.random.default_rng((count, rank)).standard_normal(count, F32) for rank in range(comm.size)
        ]
        expected = everyone[0]
        for its in everyone[1:]:
            expected = expected + its
        for algorithm in ("one_shot", "two_shot", *(["chain"] if comm.topology.uniform else [])):
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
    """Those that differ from the definition, of less than a block, of several, and in place."""
    layout(nodes)
    comm = unisono.init(timeout_s=60, check=True)
    wrong = []
    several = 2 * shards.SHARD_BYTES // F32().itemsize * comm.size + 37
    for count in (0, 1, 31, 33, 1000, several):
        for dtype in quantised.DTYPES if count < several else ("f32", "bf16"):
            made = [np.random.default_rng((count, rank)).standard_normal(count) for rank in range(comm.size)]
            everyone = [(10 * one).astype(DTYPES[dtype]) for one in made]
            for wire in quantised.WIRES:
                for op in ("sum", "avg") if count < several else ("sum",):
                    expected, x = quantised.all_reduce(everyone, op, wire), everyone[comm.rank].copy()
                    for out in (np.empty_like(x), x):
                        comm.all_reduce(x, op, out=out, wire=wire)
                        if (said := difference(out, expected)) is not None:
                            wrong.append(f"{op} of {count} {dtype} as {wire}: {said}")
    other = "int8" if comm.rank == 0 else "fp8"
    said = attempt(lambda: comm.all_reduce(np.ones(8, F32), wire=other))["error"]["text"]
    same = "called all_reduce(sum) of 8 f32 as"
    return wrong if f"rank 0 {same} int8, but rank 1 {same} fp8" in said else [*wrong, said]


def chained_sums(nodes: str) -> list[str]:
    """Sums along the chain in many small blocks, asked for and chosen, to every root: those that differ from
    the reference."""
    layout(nodes)
    chain.BLOCK_BYTES, sums.CHAIN_BYTES = 1000, 2000
    comm = unisono.init(timeout_s=60, check=False)
    wrong = []
    cases = [(1, "f32", "sum"), (5003, "bf16", "sum"), (4096, "f32", "avg"), (3001, "u8", "prod")]
    cases += [(997, "f16", "avg"), (1200, "f64", "min"), (2501, "i32", "avg"), (0, "f32", "sum")]
    for count, dtype, op in cases:
        everyone = [wild(dtype, count * comm.size, (rank, comm.size)) for rank in range(comm.size)]
        mine, expected = everyone[comm.rank], combine(everyone, op)
        own = expected.reshape(comm.size, -1)[comm.rank]

        def compare(what: str, got: Any, right: Any, case: str = f"{count} {dtype} {op}") -> None:
            if (said := difference(got, right)) is not None:
                wrong.append(f"{what} of {case}: {said}")

        for in_place, how in product((False, True), ("chain", None)):
            x = mine.copy()
            out = comm.all_reduce(x, op, x if in_place else None, algorithm=how)
            compare(f"all_reduce {in_place}", out, expected)
            x = mine.copy().reshape(comm.size, -1)
            out = comm.reduce_scatter(x, op, x[comm.rank] if in_place else None, algorithm=how)
            compare(f"reduce_scatter {in_place}", out, own)
            for root in range(comm.size):
                x = mine.copy()
                out = comm.reduce(x, root, op, x if in_place else None, algorithm=how)
                if comm.rank == root:
                    compare(f"reduce {in_place} to {root}", out, expected)
                if comm.rank != root or not in_place:
                    compare(f"reduce's input {in_place} to {root}", x, mine)
    comm.close()
    return wrong


def long_broadcasts(nodes: str) -> dict[str, Any]:
    """Broadcasts of many small blocks from every root: those that went wrong, and how many went by rails."""
    layout(nodes)
    HostSpace.grain = 100
    comm = unisono.init(timeout_s=60, check=False)
    wrong, chained = [], 0
    by_rails = comm._moves._broadcast_by_rails

    def counted(*arguments: Any) -> None:
        nonlocal chained
        chained += 1
        by_rails(*arguments)

    comm._moves._broadcast_by_rails = counted
    least = moves.LEAST_BLOCKS * len(comm.topology.nodes[0]) * HostSpace.grain
    for count in (0, 1, least - 1, least, least + 1, 5 * least + 63, 70 * least + 7):
        data = np.random.default_rng(count).integers(256, size=count, dtype=np.uint8)
        for root in range(comm.size):
            x = data.copy() if comm.rank == root else np.zeros_like(data)
            out = comm.broadcast(x, root, out=np.zeros_like(data))
            fine = [np.array_equal(out, data), (x == 0).all() or comm.rank == root]
            fine += [np.array_equal(comm.broadcast(x, root), data)]
            wrong += [] if all(fine) else [f"{count} from {root}: {fine}"]
    comm.close()
    return {"wrong": wrong, "chained": chained}
