"""`unisono tune`: measures every algorithm of every collective here and writes the table by which Plan
chooses.

The file holds one table per number of ranks, and of GPUs per card too:

    {"schema": "1.0", "machine": {...}, "device": "cuda", "card": "NVIDIA H200", "ranks": 2,
     "entries": [
      {"collective": "all_reduce", "memory": "plain", "up_to_bytes": 4096, "algorithm": "one_shot_packets"},
      ...,
      {"collective": "all_reduce", "memory": "plain", "up_to_bytes": null, "algorithm": "two_shot"}]}

and, once there is more than one, a list of them. `bytes` is the larger buffer of the call. A line may have
blocks, threads and piece_bytes (what a block takes up at once), by which kernels are cut; absent: as pays.
The tables for GPUs that are built in are such files in src/plans/.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from unisono.bench.backends.unisono import reaches_peers, shape_of
from unisono.bench.cases import COLLECTIVES, MEMORIES, size_range
from unisono.bench.records import Machine, Result
from unisono.bench.stats import Interval, Verdict, geometric_mean, verdict

SCHEMA = "1.0"
TOLERANCE = 0.01  # what is faster by less is as fast
# On GPUs, where no rank of these knows the others' buffers: their plan does not ask for the memory, and the
# table calls it plain.
ANY_MEMORY = ("all_to_all_v", "send_recv")


@dataclass(frozen=True)
class Grid:
    """What is measured of each algorithm: out of place, sums."""

    sizes: list[int]
    dtype: str  # what is summed most
    memories: list[str]
    modes: list[str]
    outclassed: float  # a variant so many times as slow as the best is measured once only


GRIDS = {
    "cpu": Grid(size_range(8, 64 << 20, 4), "f32", list(MEMORIES), ["latency"], 3.0),  # cores may be shared
    # In a queue, and alone: a program that only gives is fast in the one and slow in the other.
    "cuda": Grid(size_range(1 << 10, 1 << 30, 4), "bf16", ["symmetric"], ["graph", "events"], 1.4),
}


def tunable(device: str = "cpu") -> list[str]:
    """Collectives of which the library has more than one algorithm on that device."""
    import unisono

    return [name for name in COLLECTIVES if len(unisono.Communicator.algorithms(name, device)) > 1]


def shapes(algorithm: str) -> list[str]:
    """Of its kernels, that paid somewhere: blocks, threads, bytes of a piece."""
    if algorithm.endswith("ll128"):
        return ["128x256x3840", "128x384x5760", "128x512x7680"]
    if algorithm.endswith("packets") or algorithm == "copy_engine":
        return []
    return ["128x256x16384", "128x128x32768", "128x256x32768", "128x256x65536", "128x512x65536"]


def variants(collectives: Iterable[str], device: str = "cpu", shaped: bool = False) -> list[str]:
    """The backends to measure: `unisono:ALGORITHM` for every algorithm of these collectives, and
    `unisono:ALGORITHM@SHAPE` where their kernels are to be tried in several shapes."""
    import unisono

    known = unisono.Communicator.algorithms
    names = dict.fromkeys(name for collective in collectives for name in known(collective, device))
    asked = {name: ["", *(f"@{shape}" for shape in shapes(name))] if shaped else [""] for name in names}
    return [f"unisono:{name}{shape}" for name in names for shape in asked[name]]


def choose(results: Sequence[Result], device: str = "cpu") -> list[dict[str, Any]]:
    """The entries of a table. Along the sizes an algorithm, in its shape, stays chosen until another is
    confidently faster; the border lies halfway (geometrically) between the two sizes measured. Of several
    modes the geometric mean counts. On GPUs one measurement on symmetric memory is for all memory: an
    algorithm that does not reach the peers' buffers does not care where they lie."""
    entries: list[dict[str, Any]] = []
    for collective in COLLECTIVES:
        of_it = [r for r in results if r.case.collective == collective and r.algorithm]
        for memory in MEMORIES:
            mine = [r for r in of_it if device == "cuda" or r.case.memory == memory]
            if device == "cuda" and collective in ANY_MEMORY:
                mine = mine if memory == "plain" else []
            elif device == "cuda" and memory == "plain":
                mine = [r for r in mine if not reaches_peers(str(r.algorithm))]
            mine.sort(key=lambda r: r.case.bytes)
            chosen: list[tuple[int, str]] = []
            for size, group in groupby(mine, key=lambda r: r.case.bytes):
                chosen.append((size, _winner(_times(list(group)), chosen[-1][1] if chosen else None)))
            for index, (size, variant) in enumerate(chosen):
                last = index + 1 == len(chosen)
                if last or chosen[index + 1][1] != variant:
                    border = None if last else math.isqrt(size * chosen[index + 1][0])
                    entry = {"collective": collective, "memory": memory, "up_to_bytes": border}
                    entries.append({**entry, **_columns(variant)})
    return entries


def _times(results: Sequence[Result]) -> dict[str, Interval]:
    """Of each variant (algorithm and shape) that ran in every mode, over its modes. Sure however few the
    visits: between equals either choice is right, but not to stay with the slower."""
    modes = {r.case.mode for r in results}
    times: dict[str, Interval] = {}
    for variant in dict.fromkeys(r.backend.partition(":")[2] for r in results):
        its = [r for r in results if r.backend.partition(":")[2] == variant]
        if {r.case.mode for r in its} == modes:
            low, median, high = (
                geometric_mean([getattr(r, name) for r in its])
                for name in ("ci_low_us", "median_us", "ci_high_us")
            )
            times[variant] = Interval(median, low, high)
    return times


def _winner(times: dict[str, Interval], before: str | None) -> str:
    """The fastest; but where it is not confidently faster: copy engines, which leave the SMs to the model,
    then what was chosen `before`, then its algorithm without a shape."""
    best = min(times, key=lambda variant: times[variant].median)
    for variant in ("copy_engine", before, best.partition("@")[0]):
        if variant in times and verdict(times[best], times[variant], TOLERANCE) is not Verdict.FASTER:
            return variant
    return best


def _columns(variant: str) -> dict[str, Any]:
    """Of a table's line."""
    algorithm, _, shape = variant.partition("@")
    numbers = zip(("blocks", "threads", "piece_bytes"), shape_of(shape), strict=True) if shape else ()
    return {"algorithm": algorithm, **dict(numbers)}


def _place(table: dict[str, Any]) -> tuple[Any, ...]:
    """What a table is for."""
    return table.get("device", "cpu"), table.get("card"), table["ranks"]


def merge(existing: str | None, table: dict[str, Any]) -> list[dict[str, Any]] | dict[str, Any]:
    """`table` together with the tables for other cards and numbers of ranks in the text of an existing file.
    Entries of the same card and number stay where `table` says nothing about their collective and memory. An
    unreadable file is replaced."""
    try:
        parsed = json.loads(existing or "[]")
        tables = parsed if isinstance(parsed, list) else [parsed]
        others = [old for old in tables if _place(old) != _place(table) and old["schema"] == SCHEMA]
        same = [e for old in tables if _place(old) == _place(table) for e in old["entries"]]
        told = {(entry["collective"], entry["memory"]) for entry in table["entries"]}
        kept = [entry for entry in same if (entry["collective"], entry["memory"]) not in told]
    except (ValueError, KeyError, TypeError, AttributeError):
        others, kept = [], []
    new = {**table, "entries": [*kept, *table["entries"]]}
    return [*others, new] if others else new


def _text(tables: list[dict[str, Any]] | dict[str, Any]) -> str:
    """As JSON with an entry a line, so that a table can be read and compared."""
    if isinstance(tables, list):
        return "[" + ",\n".join(_text(table) for table in tables) + "]"
    fields = [f'"{name}": {json.dumps(value)}' for name, value in tables.items() if name != "entries"]
    entries = ",\n  ".join(json.dumps(entry) for entry in tables["entries"])
    return "{" + ",\n ".join([*fields, f'"entries": [\n  {entries}\n ]']) + "}"


def write(path: Path, ranks: int, machine: Machine, entries: Sequence[dict[str, Any]]) -> None:
    """Adds the table to `path` in one step, so that a library that starts meanwhile reads the old or the new
    file. The table is one for GPUs where the machine's record names some."""
    cards = set(machine.gpus)
    where = {"device": "cuda", "card": cards.pop() if len(cards) == 1 else ""} if cards else {}
    table = {
        "schema": SCHEMA,
        "machine": msgspec.to_builtins(machine),
        **where,
        "ranks": ranks,
        "entries": list(entries),
    }
    text = _text(merge(path.read_text() if path.is_file() else None, table))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
    os.replace(temporary, path)
