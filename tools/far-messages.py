#!/usr/bin/env python3
"""Measures messages with tags between two nodes, by Unisono and by an MPI, in the same processes and in turn.

  UNISONO_TRANSPORT=fabric UNISONO_FABRIC_PROVIDER=tcp mpiexec -n 2 python tools/far-messages.py

Each rank is a node of its own. A sample is half of a round trip, the mean of several. A round has a sample of
each way of each size. Prints a JSON line for each size: medians and quartiles of the rounds, microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

SIZES = (4 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 16 << 20)
TAG = 3
WARM = 3


def half_round_trip_us(rank: int, send: Callable[[], Any], receive: Callable[[], Any], trips: int) -> float:
    first, second = (send, receive) if rank == 0 else (receive, send)
    MPI.COMM_WORLD.Barrier()
    first(), second()
    begun = time.perf_counter()
    for _ in range(trips):
        first()
        second()
    return (time.perf_counter() - begun) / trips / 2 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--label", default="")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    os.environ.setdefault("UNISONO_NODE", f"node {world.rank}")
    import unisono

    peer = 1 - world.rank
    with unisono.init() as comm:
        samples: dict[tuple[int, str], list[float]] = {}
        for round_ in range(-WARM, options.rounds):
            for size in SIZES:
                out, into = np.ones(size, np.uint8), np.zeros(size, np.uint8)
                ways = {
                    "unisono": (
                        lambda out=out: comm.send(out, peer, tag=TAG),
                        lambda into=into: comm.recv(into, peer, tag=TAG),
                    ),
                    "mpi": (
                        lambda out=out: world.Send(out, peer, TAG),
                        lambda into=into: world.Recv(into, peer, TAG),
                    ),
                }
                trips = max(3, min(50, (4 << 20) // size))
                for way, (send, receive) in ways.items():
                    took = half_round_trip_us(world.rank, send, receive, trips)
                    if round_ >= 0:
                        samples.setdefault((size, way), []).append(took)
        if world.rank:
            return
        for size in SIZES:
            line: dict[str, Any] = {"label": options.label, "transport": comm.transport, "bytes": size}
            for way in ("unisono", "mpi"):
                took = samples[size, way]
                line[way] = [round(x, 1) for x in statistics.quantiles(took, n=4)]
            line["of_mpi"] = round(line["unisono"][1] / line["mpi"][1], 2)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
