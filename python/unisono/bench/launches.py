"""Starts the ranks of a run afresh, several times and under several MPIs in turn. All launches append to one
file of records, so that nothing is lost if one ends badly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from unisono import records
from unisono.bench import mpis, start
from unisono.bench.cases import CaseError
from unisono.bench.mpis import Mpi
from unisono.bench.options import Options
from unisono.bench.schedule import Limits
from unisono.records import FILE_NAME, Records, RecordsWriter, Skip

LEAST_SAMPLES = 300  # of a cell in a launch of many, if the time suffices
_ENDED_BY_USER = (130, 143)  # exit codes after SIGINT and SIGTERM


def run(options: Options, ranks: int, say: Callable[[str], None]) -> int:
    """Runs all launches, under each MPI that is installed. An MPI that does not start is left out, and named
    in the records. Returns 0, or the exit code of the first launch that did not end well.

    Raises CaseError if none of the MPIs is installed."""
    found = {name: mpis.find(name) for name in options.mpis}
    installed: list[Mpi | None] = [mpi for mpi in found.values() if mpi is not None]
    if found and not installed:
        raise CaseError(f"none of {', '.join(found)} is installed: `unisono info` says how to get each.")
    for name, mpi in found.items():
        if mpi is None:
            _leave_out(options, name, f"{mpis.NAMES[name]} is not installed, see `unisono info`.", say)
    turns = (installed or [None]) * options.launches
    code = 0
    broken: list[Mpi] = []
    for number, mpi in enumerate(turns, start=1):
        if mpi in broken:
            continue
        name = f"launch {number} of {len(turns)}"
        say(f"{name}, {mpis.NAMES[mpi.name]} {mpi.version}" if mpi else name)
        begin = _size(options)
        ended = start.start(_of_launch(options, number, len(turns), mpi), ranks, mpi)
        mine = _records_from(options, begin)
        if not mine.runs and mpi is not None:
            broken.append(mpi)
            _leave_out(options, mpi.name, f"its ranks did not start, mpiexec ended with code {ended}.", say)
        elif ended != 0 or not mine.ends:
            code = code or ended or 1
            say(f"{name} ended early, with code {ended}: what it has measured is kept.")
        interrupted = ended in _ENDED_BY_USER or any(end.interrupted for end in mine.ends)
        if interrupted or not (mine.runs or mpi):
            break
    return code


def _of_launch(options: Options, number: int, launches: int, mpi: Mpi | None) -> Options:
    """Returns the options of one launch: its share of the time or the samples, and an order of its own."""
    return msgspec.structs.replace(
        options,
        backends=[mpi.name if name == "mpi" and mpi else name for name in options.backends],
        launch=number,
        launches=launches,
        limits=share_of(options.limits, launches),
        seed=options.seed + number - 1,
    )


def share_of(limits: Limits, launches: int) -> Limits:
    """Returns the limits of one of so many launches. It has more rounds, of few samples each: two backends
    are judged by what they took in the same rounds."""
    if launches == 1:
        return limits
    return replace(
        limits,
        budget_s=limits.budget_s / launches,
        max_samples=min(limits.max_samples, max(math.ceil(limits.max_samples / launches), LEAST_SAMPLES)),
        rounds=2 * limits.rounds,
        samples=None if limits.samples is None else math.ceil(limits.samples / launches),
    )


def _file(options: Options) -> Path:
    return Path(options.directory) / FILE_NAME


def _size(options: Options) -> int:
    return _file(options).stat().st_size if _file(options).exists() else 0


def _records_from(options: Options, begin: int) -> Records:
    """Returns the records of the file from byte `begin` on."""
    found = Records()
    if _file(options).exists():
        records.read_file(_file(options), FILE_NAME, found, begin)
    return found


def _leave_out(options: Options, name: str, why: str, say: Callable[[str], None]) -> None:
    say(f"{name} is left out: {why}")
    writer = RecordsWriter(Path(options.directory), more=True)
    writer.write(Skip(backend=name, reason=why))
    writer.close()
