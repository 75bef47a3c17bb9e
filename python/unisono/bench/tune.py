"""`unisono tune`: measures every algorithm of every collective here, and writes the table by which Plan
chooses.

The file holds one table per number of ranks, and for GPUs per card too:

    {"schema": "1.0", "machine": {...}, "device": "cuda", "card": "NVIDIA H200", "ranks": 2,
     "entries": [
      {"collective": "all_reduce", "memory": "plain", "up_to_bytes": 4096, "algorithm": "one_shot_packets"},
      ...,
      {"collective": "all_reduce", "memory": "plain", "up_to_bytes": null, "algorithm": "two_shot"}]}

Several tables form a list. `up_to_bytes` counts the larger buffer of the call. An entry may have the shape of
the kernel: blocks, threads and piece_bytes. Without a shape, the library chooses one. The built-in tables for
GPUs are such files in src/core/plans/.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from unisono import files, tables, traits
from unisono.bench.backends.unisono import reaches_peers, shape_of
from unisono.bench.cases import size_range
from unisono.errors import UsageError
from unisono.records import Case, Machine, Result
from unisono.records.stats import MIN_SAMPLES, Interval, Verdict, geometric_mean, verdict
from unisono.records.vocabulary import COLLECTIVES, MEMORIES, NORM

SCHEMA = "1.0"
TOLERANCE = 0.01  # times that differ by a smaller share are equal
# On GPUs, no rank knows the buffers of the others in these collectives. Their plan therefore ignores the kind
# of memory, which the table calls plain.
ANY_MEMORY = ("all_to_all_v", "send_recv")
# Nor does any rank know the longest part in these. So all parts that are not sent directly go by one entry,
# whatever their size.
ANY_SIZE = ("all_to_all_v",)
AS_PAYS = "@0x0x0"  # the library's own shape of a kernel, whatever the table in force says


@dataclass(frozen=True)
class Grid:
    """The cases measured for each algorithm: out of place, sums."""

    sizes: list[int]
    dtype: str  # the usual one
    memories: list[str]
    modes: list[str]
    outclassed: float  # a variant this many times as slow as the best is not measured again


GRIDS = {
    "cpu": Grid(size_range(8, 64 << 20, 4), "f32", list(MEMORIES), ["latency"], 3.0),  # cores may be shared
    # Between nodes the kind of memory makes no difference.
    "nodes": Grid(size_range(8, 64 << 20, 4), "f32", ["plain"], ["latency"], 3.0),
    # Both in a queue and alone: a program that only pushes is fast in a queue and slow alone.
    "cuda": Grid(size_range(1 << 10, 1 << 30, 4), "bf16", ["symmetric"], ["graph", "events"], 1.4),
}


def tunable(device: str = "cpu") -> list[str]:
    """Returns the collectives with more than one algorithm on that device."""
    import unisono

    norms = [NORM] if device == "cpu" else []  # on GPUs the table's names are not those that a norm takes
    names = [*COLLECTIVES, *norms]
    return [name for name in names if len(unisono.Communicator.algorithms(name, device)) > 1]


def shapes(algorithm: str) -> list[str]:
    """Returns the shapes of the algorithm's kernels that paid somewhere: blocks, threads, piece's bytes."""
    pieces = traits.algorithm(algorithm).pieces
    if pieces == "lines":
        return ["128x256x3840", "128x384x5760", "128x512x7680"]
    if pieces == "packets" or algorithm == "copy_engine":
        return []
    return ["128x256x16384", "128x128x32768", "128x256x32768", "128x256x65536", "128x512x65536"]


def variants(collectives: Iterable[str], device: str = "cpu", shaped: bool = False) -> list[str]:
    """Returns the backends to measure: `unisono:ALGORITHM` for every algorithm of these collectives, and with
    `shaped` `unisono:ALGORITHM@SHAPE` for every shape."""
    import unisono

    known = unisono.Communicator.algorithms
    names = dict.fromkeys(name for collective in collectives for name in known(collective, device))
    first = AS_PAYS if device == "cuda" else ""
    return [
        f"unisono:{name}{shape}"
        for name in names
        for shape in (first, *(f"@{shape}" for shape in shapes(name) if shaped))
    ]


def choose(results: Sequence[Result], device: str = "cpu") -> list[dict[str, Any]]:
    """Returns the entries of a table.

    With growing size, an algorithm in its shape stays chosen until another is confidently faster. The border
    is the geometric mean of the two measured sizes. The geometric mean over several modes counts."""
    entries: list[dict[str, Any]] = []
    for collective in (*COLLECTIVES, NORM):
        known = [r for r in results if r.case.collective == collective and r.algorithm]
        for memory in MEMORIES:
            mine = sorted(_usable(known, collective, memory, device), key=lambda r: r.case.bytes)
            times = {size: _times(list(of_size)) for size, of_size in groupby(mine, lambda r: r.case.bytes)}
            if device == "cuda" and collective in ANY_SIZE:
                times = _over_sizes(times)
            chosen: list[tuple[int, str]] = []
            for size, found in times.items():
                chosen.append((size, _winner(found, chosen[-1][1] if chosen else None)))
            for index, (size, variant) in enumerate(chosen):
                last = index + 1 == len(chosen)
                if last or chosen[index + 1][1] != variant:
                    border = None if last else math.isqrt(size * chosen[index + 1][0])
                    entry = {"collective": collective, "memory": memory, "up_to_bytes": border}
                    entries.append({**entry, **_columns(variant)})
    if device == "cuda" and {r.case.ranks for r in results} == {2}:
        return _parts_of_two(entries)
    return entries


def _parts_of_two(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the entries with one more for the parts that two GPUs send directly, which are as long as the
    messages that a send_recv sends so. Among more GPUs no part goes directly, since long and short ones would
    wait for each other (docs/notes/gpu-kernels.md)."""
    sent = [entry for entry in entries if entry["collective"] == "send_recv"]
    staged = [entry for entry in sent if entry["algorithm"] != "direct"]
    if not staged or sent[-1] is staged[-1]:
        return list(entries)
    made: list[dict[str, Any]] = []
    for entry in entries:
        if entry["collective"] not in ANY_SIZE:
            made.append(entry)
            continue
        made.append({**entry, "up_to_bytes": staged[-1]["up_to_bytes"]})
        made.append({**sent[-1], "collective": entry["collective"]})
    return made


def brief(results: Sequence[Result]) -> int:
    """Returns in how many cases the fastest variant has too few visits for an interval. Other variants may
    have been outclassed."""
    best: dict[Case, Result] = {}
    for r in results:
        if r.case not in best or r.median_us < best[r.case].median_us:
            best[r.case] = r
    return sum(len(r.visits) < MIN_SAMPLES for r in best.values())


def _usable(results: Sequence[Result], collective: str, memory: str, device: str) -> list[Result]:
    """Returns the results that hold for calls on such memory. On GPUs, one measurement on symmetric memory
    holds for both kinds: algorithms that do not reach the peers' buffers are as fast on either."""
    if device != "cuda":
        return [r for r in results if r.case.memory == memory]
    if collective in ANY_SIZE:
        results = [r for r in results if not reaches_peers(str(r.algorithm))]
    if collective in ANY_MEMORY:
        return list(results) if memory == "plain" else []
    return [r for r in results if memory == "symmetric" or not reaches_peers(str(r.algorithm))]


def _times(results: Sequence[Result]) -> dict[str, Interval]:
    """Returns the time of each variant (algorithm and shape) that ran in every mode, over its modes.

    Intervals count as sure however few the visits. Either of two equal variants is right, but a slower one
    must not stay chosen for want of visits."""
    modes = {r.case.mode for r in results}
    of_variant: dict[str, dict[str, Interval]] = {}
    for r in results:
        found = Interval(r.median_us, r.ci_low_us, r.ci_high_us)
        of_variant.setdefault(r.backend.partition(":")[2], {})[r.case.mode] = found
    return {name: _mean(list(found.values())) for name, found in of_variant.items() if set(found) == modes}


def _over_sizes(times: dict[int, dict[str, Interval]]) -> dict[int, dict[str, Interval]]:
    """Returns times for one entry for all sizes: the mean over the sizes of each variant that ran at all, as
    multiples of the best time at each size."""
    names = set.intersection(*(set(found) for found in times.values())) if times else set()
    least = {size: min(t.median for t in found.values()) for size, found in times.items() if found}
    multiples = {
        name: _mean([_divided(found[name], least[size]) for size, found in times.items()]) for name in names
    }
    return {0: multiples} if multiples else {}


def _mean(intervals: Sequence[Interval]) -> Interval:
    median, low, high = (
        geometric_mean([getattr(one, name) for one in intervals]) for name in ("median", "low", "high")
    )
    return Interval(median, low, high)


def _divided(one: Interval, by: float) -> Interval:
    return Interval(one.median / by, one.low / by, one.high / by)


def _winner(times: dict[str, Interval], before: str | None) -> str:
    """Returns the fastest variant. If it is not confidently faster, others come first: copy engines, as they
    leave the SMs to the model; the variant chosen `before`; the same algorithm without a shape."""
    best = min(times, key=lambda variant: times[variant].median)
    for variant in (f"copy_engine{AS_PAYS}", before, best.partition("@")[0] + AS_PAYS):
        if variant in times and verdict(times[best], times[variant], TOLERANCE) is not Verdict.FASTER:
            return variant
    return best


def _columns(variant: str) -> dict[str, Any]:
    """Returns the columns of an entry for this variant."""
    algorithm, _, shape = variant.partition("@")
    numbers = zip(("blocks", "threads", "piece_bytes"), shape_of(shape), strict=True) if shape else ()
    return {"algorithm": algorithm, **{name: number for name, number in numbers if number}}


def _place(table: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the key of a table: device, card, nodes and ranks."""
    return table.get("device", "cpu"), table.get("card"), table.get("nodes"), table["ranks"]


def merge(existing: str | None, table: dict[str, Any]) -> list[dict[str, Any]] | dict[str, Any]:
    """Returns `table` with the tables for other cards and numbers of ranks in the text of an existing file.

    Entries of the same card and number stay if `table` has none for their collective and memory. An
    unreadable file is replaced."""
    try:
        parsed = json.loads(existing or "[]")
        found = parsed if isinstance(parsed, list) else [parsed]
        others = [old for old in found if _place(old) != _place(table) and old["schema"] == SCHEMA]
        same = [e for old in found if _place(old) == _place(table) for e in old["entries"]]
        measured = {(entry["collective"], entry["memory"]) for entry in table["entries"]}
        kept = [entry for entry in same if (entry["collective"], entry["memory"]) not in measured]
    except (ValueError, KeyError, TypeError, AttributeError):
        others, kept = [], []
    new = {**table, "entries": [*kept, *table["entries"]]}
    return [*others, new] if others else new


def _text(made: list[dict[str, Any]] | dict[str, Any]) -> str:
    """Returns JSON with an entry a line, which people can read and compare."""
    if isinstance(made, list):
        return "[" + ",\n".join(_text(table) for table in made) + "]"
    fields = [f'"{name}": {json.dumps(value)}' for name, value in made.items() if name != "entries"]
    entries = ",\n  ".join(json.dumps(entry) for entry in made["entries"])
    return "{" + ",\n ".join([*fields, f'"entries": [\n  {entries}\n ]']) + "}"


def write(
    path: Path, ranks: int, machine: Machine, entries: Sequence[dict[str, Any]], nodes: int = 0
) -> None:
    """Adds a table to the file `path` in one step: a library that starts meanwhile reads the old or new file.

    The table is for GPUs if the machine's record names any, or for that many `nodes` unless 0. Raises
    ResourceError."""
    cards = set(machine.gpus)
    where: dict[str, Any] = {"device": "nodes", "nodes": nodes} if nodes else {}
    if cards and not nodes:
        where = {"device": "cuda", "card": cards.pop() if len(cards) == 1 else ""}
    table = {
        "schema": SCHEMA,
        "machine": msgspec.to_builtins(machine),
        **where,
        "ranks": ranks,
        "entries": list(entries),
    }
    try:
        existing = tables.read(path) if path.is_file() else None
    except UsageError:
        existing = None
    text = _text(merge(existing, table))
    files.write(path, f"{text}\n".encode())
