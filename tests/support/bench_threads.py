"""A session of the bench with ranks as threads of the test: how they meet, and options for a short run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

from unisono.bench.options import Options
from unisono.bench.schedule import Limits


@dataclass
class Meeting:
    """A bootstrap between threads."""

    rank: int
    size: int
    slots: list[bytes]
    door: Barrier

    def all_gather(self, data: bytes) -> list[bytes]:
        self.slots[self.rank] = data
        self.door.wait(60)
        found = list(self.slots)
        self.door.wait(60)
        return found


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
