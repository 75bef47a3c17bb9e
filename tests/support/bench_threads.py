"""A session of the bench with ranks as threads of the test: how they meet, and options for a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.bench.one_process import Meeting
from unisono.bench.options import Options
from unisono.bench.schedule import Limits

__all__ = ["Meeting", "options"]


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
