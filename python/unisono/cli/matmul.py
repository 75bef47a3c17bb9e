"""The options of matmuls with their collective."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.bench.cases import CaseError
from unisono.bench.matmul import NAMED, ROWS, SHAPES, USUAL_DTYPES, Grid, weights
from unisono.records.vocabulary import MATMUL, MATMULS

from .asked import Asked
from .moe import DTYPES, numbers


def grid_of(asked: Asked, collectives: Sequence[str], dtypes: Sequence[str], modes: Sequence[str]) -> Grid:
    """Returns the cases that are asked for. `dtypes`, `modes`: those of the run, which count if the user
    names some. Raises CaseError."""
    device = asked.device
    usual = Grid(rows=ROWS[device], shapes=SHAPES[device], dtypes=USUAL_DTYPES[device], device=device)
    if {*MATMULS, MATMUL}.isdisjoint(collectives):
        named = {"--rows": asked.rows, "--shape": asked.shapes}
        if given := [name for name, value in named.items() if value is not None]:
            raise CaseError(f"{', '.join(given)}: of matmuls, so add --matmul, or name {MATMUL}.")
        return usual
    if asked.fabric or asked.to_memory_limit or asked.one_process:
        raise CaseError(
            "matmuls have no form for --fabric, --to-memory-limit and --one-process: leave them out."
        )
    if asked.dtypes is not None and (wrong := [name for name in dtypes if name not in DTYPES]):
        raise CaseError(f"matmuls have no {', '.join(wrong)}: choose from {', '.join(DTYPES)}.")
    return Grid(
        rows=numbers("--rows", asked.rows, usual.rows),
        shapes=_shapes(asked.shapes, usual.shapes),
        dtypes=usual.dtypes if asked.dtypes is None else tuple(dtypes),
        modes=tuple(modes) if device == "cuda" or asked.modes is not None else usual.modes,
        device=device,
    )


def _shapes(text: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    if text is None:
        return usual
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts or not all(map(weights, parts)):
        raise CaseError(f"--shape {text}: choose from {', '.join(NAMED)}, or write K and N like 8192x2048.")
    return tuple(parts)
