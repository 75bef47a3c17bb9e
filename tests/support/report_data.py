"""Records for the tests of the report: invented, deterministic, in the shape of a real run."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from unisono import records
from unisono.bench import cases, pairs, scaling
from unisono.records import (
    Case,
    End,
    Failure,
    Machine,
    Record,
    Result,
    Run,
    Verification,
    derived,
    stats,
    vocabulary,
)

GOOD = Verification(before=True, after=True, bound="bit-exact")
_SPEED = {"unisono": 1.0, "mpi": 2.0, "gloo": 3.0}


def run(ranks: int = 2, **other: Any) -> Run:
    machine = Machine(
        cpu="Test CPU",
        cores=2,
        memory_bytes=8 << 30,
        numa_nodes=1,
        kernel="6.1",
        caches={"L1d": 32768, "L3": 33554432},
    )
    values: dict[str, Any] = {
        "schema": records.SCHEMA_VERSION,
        "run_id": f"run-{ranks}",
        "started_at": "2026-01-02T03:04:05+00:00",
        "command": ["unisono", "bench", "--ranks", str(ranks), "-O", "my results"],
        "preset": "quick",
        "seed": 1,
        "ranks": ranks,
        "launcher": "unisono",
        "machine": machine,
        "libraries": {"mpich": "4.3"},
        "environment": {"OMP_NUM_THREADS": "1"},
        "commit": "abc123",
    }
    return Run(**(values | other))


def end(interrupted: bool = False) -> End:
    return End(finished_at="2026-01-02T03:05:05+00:00", elapsed_s=60.0, interrupted=interrupted)


def case(collective: str = "all_reduce", size: int = 65536, ranks: int = 2, **other: Any) -> Case:
    """Returns a case as the bench makes it. other: replaces fields."""
    return msgspec.structs.replace(cases.make_case(collective, size, "f32", ranks), **other)


def result(backend: str, what: Case, samples: Iterable[float], **other: Any) -> Result:
    """Returns a result with exactly these samples. Units: us."""
    times = [float(sample) for sample in samples]
    visits, launches = other.get("visits", []), other.get("launches", [])
    interval = stats.visited_interval(times, visits) if visits else stats.median_interval(times)
    interval = stats.launched_interval(times, visits, launches) if len(set(launches)) > 1 else interval
    bandwidth, bus, share = derived.bandwidths(what, interval.median, 12.0, other.get("wire_bits"))
    values: dict[str, Any] = {
        "algorithm": "two_shot" if backend == "unisono" else None,
        "samples_us": times,
        "median_us": interval.median,
        "ci_low_us": interval.low,
        "ci_high_us": interval.high,
        "skew_us": 0.5,
        "calls_per_sample": 1,
        "verification": GOOD,
        "algbw_gbps": bandwidth,
        "busbw_gbps": bus,
        "ceiling_gbps": 12.0 if share else None,
        "sol": share,
        "converged": True,
    }
    return Result(case=what, backend=backend, **(values | other))


def timed(backend: str, what: Case, median_us: float | None = None, count: int = 60, **other: Any) -> Result:
    """Returns a result whose samples scatter by about a tenth. median_us: None lets it grow with the size."""
    seed = zlib.crc32(msgspec.json.encode((backend, what)))
    middle = median_us or _SPEED.get(backend, 2.5) * (3 + what.bytes / 5e3)
    samples = middle * np.random.default_rng(seed).lognormal(0, 0.1, count)
    return result(backend, what, samples, **other)


def failure(
    backend: str = "unisono", what: Case | None = None, message: str = "element 3 is wrong"
) -> Failure:
    return Failure(backend=backend, case=what or case(), rank=1, message=message)


def sweep(
    backends: Iterable[str] = ("unisono", "mpi", "gloo"),
    collectives: Iterable[str] = ("all_reduce", "broadcast", "barrier"),
    sizes: Iterable[int] = (8, 4096, 262144),
    ranks: int = 2,
    modes: Iterable[str] = ("latency", "throughput"),
    count: int = 60,
) -> list[Result]:
    grid = cases.grid(ranks, list(collectives), list(sizes), modes=list(modes))
    return [timed(backend, what, count=count) for backend, what in itertools.product(backends, grid)]


def exact(backend: str, what: Case, us: float) -> Result:
    """Returns a result whose interval lies just above `us`."""
    return result(backend, what, [us * (1 + 1e-4 * i) for i in range(20)])


def pingpongs(ranks: int, slow: pairs.Pair) -> list[Record]:
    """Returns results of 1 us for 8 B and 100 us for 1 MiB. The slow pair takes twice as long."""
    found: list[Record] = []
    for pair in pairs.select(pairs.ALL, ranks):
        for pattern in vocabulary.PATTERNS:
            for size, us in ((8, 1.0), (1 << 20, 100.0)):
                for mode in vocabulary.MODES:
                    what = case(vocabulary.PINGPONG, size, ranks, pattern=pattern, pair=pair, mode=mode)
                    time = us * (2 if pair == slow else 1)
                    found += [exact("unisono", what, time), exact("mpi", what, 3 * time)]
    return found


def scaled(kind: str, times: dict[int, float], backend: str = "unisono", **other: Any) -> list[Record]:
    """Returns results of an all_gather of 64 KiB on each rank (weak), or on all ranks together (strong)."""
    found: list[Record] = []
    for ranks, us in times.items():
        size = scaling.case_bytes(kind, "all_gather", 65536, ranks)
        point = records.Scaling(kind=kind, bytes=65536)
        found.append(exact(backend, case("all_gather", size, ranks, scaling=point, **other), us))
    return found


def lines(*found: Record | Iterable[Record]) -> bytes:
    flat: list[Record] = []
    for item in found:
        flat += item if isinstance(item, list) else [item]  # type: ignore[list-item]
    return b"".join(msgspec.json.encode(record) + b"\n" for record in flat)


def write(directory: Path, *found: Record | Iterable[Record], name: str = records.FILE_NAME) -> Path:
    """Writes these records to a file. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(lines(*found))
    return directory
