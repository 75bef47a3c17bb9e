"""Sessions of the bench with ranks as threads of the test, and options for a short session."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier
from typing import Any

import unisono
from unisono import records
from unisono.bench.control import Control
from unisono.bench.one_process import Meeting
from unisono.bench.options import Options
from unisono.bench.schedule import Limits
from unisono.bench.session import Outcome, Session

SessionOf = Callable[[Control, unisono.Communicator, unisono.Communicator], Session]


def meetings(ranks: int) -> list[Meeting]:
    """A bootstrap for each rank."""
    slots, door = [b""] * ranks, Barrier(ranks)
    return [Meeting(rank, ranks, slots, door) for rank in range(ranks)]


def options(directory: Path, backends: list[str], **changes: Any) -> Options:
    values: dict[str, Any] = {
        "directory": str(directory),
        "command": ["unisono", "bench"],
        "preset": None,
        "backends": backends,
        "collectives": ["all_reduce", "all_gather", "barrier"],
        "sizes": [64, 4096],
        "dtypes": ["f32"],
        "ops": ["sum"],
        "placements": ["out_of_place"],
        "memories": ["plain", "symmetric"],
        "modes": ["latency", "throughput"],
        "workloads": [],
        "limits": Limits(budget_s=30, samples=8, rounds=2),
        "seed": 7,
        "cores": 5,
    }
    return Options(**{**values, **changes})


def run_session(
    chosen: Options, ranks: int, session_of: SessionOf, check: bool | None = None
) -> tuple[records.Records, list[Outcome]]:
    """What was recorded, and how each rank's session ended. `session_of` takes a rank's control and its
    communicators, for common starts and for the calls that are measured, of which `check` is an option."""
    align, measured = unisono.init_threads(ranks), unisono.init_threads(ranks, check=check)

    def rank(meeting: Meeting) -> Outcome:
        number = meeting.rank
        with closing(session_of(Control(meeting), align[number], measured[number])) as session:
            return session.run()

    with ThreadPoolExecutor(ranks) as pool:
        outcomes = list(pool.map(rank, meetings(ranks)))
    for communicator in (*align, *measured):
        communicator.close()
    return records.read(Path(chosen.directory)), outcomes
