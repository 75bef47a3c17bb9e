#!/usr/bin/env python3
"""Measures messages of torch.distributed on CPUs by Unisono and by gloo, in the same processes and in turn.

  OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tools/torch-messages.py --out FILE

A round has a sample of each way of each case, in random order. A sample lasts several calls of rank 0, after
a barrier, and is given by one call. Cases, with 2 ranks:
  send, recv      half a round trip of dist.send and dist.recv
  isend, irecv    the same, of isend and irecv, each waited for at once
  shift           batch_isend_irecv in a ring: everyone sends to the next rank and receives from the last one
Ways:
  unisono, gloo   the two backends
  tagged          a Communicator's send and recv with a tag, without torch
  untagged        without a tag
Tensors of torch have small pages, unless torch is told otherwise (THP_MEM_ALLOC_ENABLE=1). Medians of rounds
have exact intervals of 95 %. The ratio is gloo's time by Unisono's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono.bench import provenance
from unisono.records import stats

TAG = 3
SIZES = (8, 512, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
Call = Callable[[], object]


def in_turn(rank: int, send: Call, recv: Call) -> Call:
    """Returns a round trip."""
    first, second = (send, recv) if rank == 0 else (recv, send)

    def call() -> None:
        first()
        second()

    return call


def waited(begin: Callable[..., Any], *args: object) -> Call:
    """Returns a call that begins something and waits for it."""

    def call() -> None:
        begin(*args).wait()

    return call


def shift(x: torch.Tensor, out: torch.Tensor, group: Any) -> Call:
    rank, size = dist.get_rank(), dist.get_world_size()
    messages = [
        dist.P2POp(dist.isend, x, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, out, (rank - 1) % size, group),
    ]

    def call() -> None:
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    return call


def ways_of(size: int, groups: dict[str, Any], comm: unisono.Communicator) -> dict[tuple[str, str], Call]:
    """Returns the calls of messages of so many bytes, by case and way."""
    rank = dist.get_rank()
    peer = 1 - rank
    x, out = (torch.full((size,), rank + 1, dtype=torch.uint8) for _ in range(2))
    found: dict[tuple[str, str], Call] = {}
    for name, group in groups.items():
        found["send, recv", name] = in_turn(
            rank, partial(dist.send, x, peer, group), partial(dist.recv, out, peer, group)
        )
        found["isend, irecv", name] = in_turn(
            rank, waited(dist.isend, x, peer, group), waited(dist.irecv, out, peer, group)
        )
        found["shift", name] = shift(x, out, group)
    found["send, recv", "tagged"] = in_turn(
        rank, partial(comm.send, x, peer, tag=TAG), partial(comm.recv, out, peer, tag=TAG)
    )
    found["send, recv", "untagged"] = in_turn(
        rank, partial(comm.send, x, peer), partial(comm.recv, out, peer)
    )
    for key, call in found.items():
        out.zero_()
        call()
        if not bool((out == peer + 1).all()):
            raise SystemExit(f"{key} of {size} bytes has received something else.")
    return found


def sample(call: Call, calls: int) -> float:
    """Returns the microseconds of a call."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - began) / calls


def calls_of(ways: dict[tuple[str, str], Call]) -> dict[tuple[str, str], int]:
    """Returns how many calls a sample has: those of about 5 ms, alike on every rank."""
    found = {}
    for key, call in ways.items():
        took = torch.tensor(sample(call, 3))
        dist.all_reduce(took, dist.ReduceOp.MAX)
        found[key] = max(2, min(500, round(5e3 / took.item())))
    return found


def measure(size: int, rounds: int, groups: dict[str, Any], comm: unisono.Communicator) -> list[Any]:
    """Returns a row of each case."""
    ways = ways_of(size, groups, comm)
    calls = calls_of(ways)
    order = random.Random(size)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in ways}
    for _ in range(rounds):
        for key in order.sample(list(ways), len(ways)):
            trips = 1 if key[0] == "shift" else 2
            times[key].append(sample(ways[key], calls[key]) / trips)
    rows = []
    for case in dict.fromkeys(case for case, _ in ways):
        of = {way: times[case, way] for one, way in ways if one == case}
        row: dict[str, Any] = {"case": case, "bytes": size}
        row["us"] = {way: interval(values) for way, values in of.items()}
        if "gloo" in of:
            pairs = zip(of["gloo"], of["unisono"], strict=True)
            row["ratio"] = interval([theirs / mine for theirs, mine in pairs])
        rows.append(row)
    return rows


def interval(values: list[float]) -> dict[str, float]:
    found = stats.median_interval(values)
    return {"median": round(found.median, 3), "low": round(found.low, 3), "high": round(found.high, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a message")
    parser.add_argument("--no-gloo", action="store_true", help="leaves gloo out")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    groups = {"unisono": dist.group.WORLD}
    if not asked.no_gloo:
        groups["gloo"] = dist.new_group(backend="gloo")
    rows = []
    comm = unisono.init()
    for size in asked.sizes:
        for row in measure(size, asked.rounds, groups, comm):
            rows.append(row)
            if dist.get_rank() == 0:
                us = "".join(f"  {way} {of['median']:9.2f}" for way, of in row["us"].items())
                ratio = f"  {row['ratio']['median']:6.2f}x" if "ratio" in row else ""
                print(f"{row['case']:13}{size:9}{us} us{ratio}", flush=True)
    comm.close()
    if asked.out and dist.get_rank() == 0:
        about = {
            "ranks": dist.get_world_size(),
            "rounds": asked.rounds,
            "torch": torch.__version__,
            "unisono": unisono.__version__,
            "cpu": provenance.machine().cpu,
            "cores": len(os.sched_getaffinity(0)),
        }
        asked.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
