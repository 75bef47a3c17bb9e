"""The options of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.bench import cases
from unisono.bench.cases import CaseError
from unisono.bench.moe import Grid
from unisono.records.vocabulary import LAYOUTS, MOES, NORM, ROUTINGS

from .asked import Asked

DTYPES = ("f32", "f16", "bf16")


def grid_of(
    asked: Asked, collectives: Sequence[str], dtypes: Sequence[str] | None, modes: Sequence[str]
) -> Grid:
    """Returns the cases that are asked for. `dtypes`: None if the user names none. `modes`: those of the run.
    Raises CaseError."""
    named = {
        "--tokens": asked.tokens,
        "--hidden": None if NORM in collectives else asked.hidden,
        "--experts": asked.experts,
        "--top-k": asked.top_k,
        "--routing": asked.routings,
        "--layout": asked.layouts,
    }
    usual = Grid()
    if set(MOES).isdisjoint(collectives):
        if given := [name for name, value in named.items() if value is not None]:
            raise CaseError(f"{', '.join(given)}: of a mixture of experts, so add --moe, or name {MOES[-1]}.")
        return usual
    if asked.fabric or asked.to_memory_limit:
        raise CaseError(
            "a mixture of experts has no form for --fabric and --to-memory-limit: leave them out."
        )
    if wrong := [name for name in dtypes or () if name not in DTYPES]:
        raise CaseError(f"a mixture of experts has no {', '.join(wrong)}: choose from {', '.join(DTYPES)}.")
    return Grid(
        tokens=numbers("--tokens", asked.tokens, usual.tokens),
        hidden=numbers("--hidden", asked.hidden, usual.hidden),
        experts=usual.experts if asked.experts is None else asked.experts,
        top_k=numbers("--top-k", asked.top_k, usual.top_k),
        routings=_names("routing", asked.routings, ROUTINGS, usual.routings),
        layouts=_names("layout", asked.layouts, LAYOUTS, usual.layouts),
        dtypes=usual.dtypes if dtypes is None else tuple(dtypes),
        modes=tuple(modes) if asked.device == "cuda" or asked.modes is not None else usual.modes,
        device=asked.device,
    )


def _names(kind: str, text: str | None, known: Sequence[str], usual: tuple[str, ...]) -> tuple[str, ...]:
    return usual if text is None else tuple(cases.split_names(kind, text, known))


def numbers(option: str, text: str | None, usual: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the numbers of `1,64,512` in ascending order. Raises CaseError."""
    if text is None:
        return usual
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 0 < int(part) < 1 << 31 for part in parts):
        raise CaseError(f"{option} {text}: write numbers from 1 on, like 1,64,512.")
    return tuple(sorted({int(part) for part in parts}))
