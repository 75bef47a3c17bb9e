"""The options of fused norms."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.bench import cases
from unisono.bench.cases import CaseError
from unisono.bench.norm import BLOCK, Grid
from unisono.records.vocabulary import NORM, QUANTS

from .asked import Asked
from .moe import DTYPES, numbers


def grid_of(
    asked: Asked,
    collectives: Sequence[str],
    sizes: Sequence[int],
    dtypes: Sequence[str],
    memories: Sequence[str],
    modes: Sequence[str],
) -> Grid:
    """Returns the cases that are asked for. `sizes`, `dtypes`, `memories`, `modes`: those of the run, which
    count if the user names some; on GPUs arrays are plain. Raises CaseError."""
    usual = Grid()
    if NORM not in collectives:
        if asked.quants is not None:
            raise CaseError(f"--quant is of fused norms, so add --norm, or name {NORM}.")
        return usual
    if asked.fabric or asked.to_memory_limit:
        raise CaseError("fused norms have no form for --fabric and --to-memory-limit: leave them out.")
    if asked.device == "cuda" and asked.quants is not None:
        raise CaseError("quantised norms of GPUs are measured by tools/norm-streams.py: leave --quant out.")
    if asked.dtypes is not None and (wrong := [name for name in dtypes if name not in DTYPES]):
        raise CaseError(f"fused norms have no {', '.join(wrong)}: choose from {', '.join(DTYPES)}.")
    usual_memory = asked.memories is None or asked.device == "cuda"
    named = asked.sizes, asked.begin, asked.end, asked.factor, asked.step
    grid = Grid(
        sizes=usual.sizes if all(one is None for one in named) else tuple(sizes),
        hidden=numbers("--hidden", asked.hidden, usual.hidden),
        dtypes=usual.dtypes if asked.dtypes is None else tuple(dtypes),
        quants=None if asked.quants is None else tuple(cases.split_names("quant", asked.quants, QUANTS)),
        memories=usual.memories if usual_memory else tuple(memories),
        modes=tuple(modes) if asked.device == "cuda" or asked.modes is not None else usual.modes,
        device=asked.device,
    )
    if QUANTS[1] in (grid.quants or ()) and any(hidden % BLOCK for hidden in grid.hidden):
        raise CaseError(f"--quant {QUANTS[1]} has blocks of {BLOCK}: give multiples of {BLOCK} as --hidden.")
    return grid
