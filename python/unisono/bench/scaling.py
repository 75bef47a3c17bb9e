"""`unisono scaling`: the same collectives on 1, 2, 4, 8, ... ranks.

weak: every rank brings the same bytes at any number of ranks. strong: all ranks together bring the same
bytes, in equal parts. A rank brings the smaller buffer of all_gather and gather (the larger one holds the
parts of all ranks), and the larger buffer of other collectives; in broadcast and scatter, the root's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from unisono import records
from unisono.bench import start
from unisono.bench.cases import CaseError
from unisono.bench.options import Options
from unisono.records import Case, Scaling

KINDS = ("weak", "strong")
BUFFERS = ("used", "largest")
SIZES = "1K,64K,1M,16M"
_GATHERING = ("all_gather", "gather")


def parse_counts(text: str) -> list[int]:
    """Returns the numbers of `1,2,4,8`, in ascending order. Raises CaseError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise CaseError(f"--ranks {text}: write the numbers of ranks, like 1,2,4,8.")
    return sorted({int(part) for part in parts})


def kinds_of(weak: bool, strong: bool) -> tuple[str, ...]:
    """Returns the kinds that are asked for. Raises CaseError if there is none."""
    chosen = tuple(kind for kind, wanted in zip(KINDS, (weak, strong), strict=True) if wanted)
    if not chosen:
        raise CaseError("choose --weak, --strong, or both.")
    return chosen


def default_counts(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def case_bytes(kind: str, collective: str, size: int, ranks: int) -> int:
    """Returns `Case.bytes` of the point at `ranks`. `size`: the bytes of a rank (weak) or of all (strong)."""
    brought = size if kind == "weak" else size // ranks
    return brought * ranks if collective in _GATHERING else brought


def grid(options: Options, ranks: int) -> list[Case]:
    """Returns the cases of this number of ranks. Raises CaseError for a size below an element a block."""
    found = []
    for kind in options.scaling:
        for name in options.collectives:
            for size in options.sizes:
                sizes = [case_bytes(kind, name, size, ranks)]
                of_point = msgspec.structs.replace(options, collectives=[name], sizes=sizes)
                point = Scaling(kind=kind, bytes=size)
                points = of_point.grid(ranks)
                if any(case.bytes > sizes[0] for case in points):  # rounded up to a block for each rank
                    few = f"{size} B are too few for {ranks} ranks"
                    raise CaseError(f"{kind} scaling of {name}: {few}; give larger --sizes.")
                found += [msgspec.structs.replace(case, scaling=point) for case in points]
    return found


def room_bytes(options: Options, counts: Sequence[int]) -> int:
    """Returns the bytes of the largest buffer that any number of ranks needs."""
    points = [
        case_bytes(kind, name, size, ranks)
        for kind in options.scaling
        for name in options.collectives
        for size in options.sizes
        for ranks in counts
    ]
    return max(points)


def of_count(options: Options, counts: Sequence[int], ranks: int) -> Options:
    """Returns the options of one number of ranks, with its share of the time and a directory of its own."""
    share = replace(options.limits, budget_s=options.limits.budget_s / len(counts))
    folder = Path(options.directory) / f"{ranks}-ranks"
    return msgspec.structs.replace(options, directory=str(folder), limits=share)


def run(options: Options, counts: Sequence[int], say: Callable[[str], None]) -> int:
    """Runs one number of ranks after the other, until a run fails or is interrupted. Returns 0, or the last
    launcher's exit code. Raises CaseError if the machine cannot run the most ranks."""
    start.ranks_to_start(max(counts), options.device, options.cores)
    for ranks in counts:
        say(f"{ranks} of {max(counts)} ranks")
        mine = of_count(options, counts, ranks)
        code = start.start(mine, ranks)
        if code != 0 or any(end.interrupted for end in records.read(Path(mine.directory)).ends):
            return code
    return 0
