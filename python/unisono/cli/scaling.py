"""`unisono scaling`: how the time of a collective changes with the number of ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from unisono.bench import scaling as points
from unisono.bench import start
from unisono.bench.cases import CaseError
from unisono.bench.options import Options
from unisono.records import vocabulary
from unisono.records.vocabulary import COLLECTIVES, DTYPES, MEMORIES

from . import finish
from .asked import Asked
from .common import Output, WithReport, check_ranks, console, guarded, run_bench
from .output import directory_of
from .resolve import options_of


def scaling(
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COLLECTIVE]...", help=f"Of {', '.join(COLLECTIVES)}; default: all.", show_default=False
        ),
    ] = None,
    weak: Annotated[bool, typer.Option("--weak", help="Every rank brings the same bytes.")] = False,
    strong: Annotated[bool, typer.Option("--strong", help="All ranks together bring them.")] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks",
            help="List; default: 1, 2, 4, ... to 8 or the GPUs. Under a launcher only its number runs.",
        ),
    ] = None,
    buffers: Annotated[
        str,
        typer.Option("--buffers", help="used: sized for the ranks in use; largest: for the largest number."),
    ] = "used",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    backend: Annotated[str | None, typer.Option("--backend", "--backends", help="List, or all.")] = None,
    sizes: Annotated[
        str, typer.Option("--sizes", help="Bytes of each rank (weak), or of all together (strong).")
    ] = points.SIZES,
    dtype: Annotated[str, typer.Option("-d", "--dtype", help=f"List of {', '.join(DTYPES)}.")] = "f32",
    memory: Annotated[str, typer.Option("--memory", help=f"List of {', '.join(MEMORIES)}.")] = "plain",
    mode: Annotated[str | None, typer.Option("--mode", help="Default: latency, on GPUs graph.")] = None,
    budget: Annotated[float, typer.Option("--budget", help="Seconds for all numbers of ranks.")] = 120.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the order of cases and of the data.")] = None,
    output: Output = None,
    report: WithReport = True,
) -> None:
    """Measures collectives on 1, 2, 4, 8, ... ranks and reports the efficiency against the fewest."""
    asked = Asked(
        named=named,
        device=device,
        backends=backend,
        sizes=sizes,
        dtypes=dtype,
        memories=memory,
        modes=mode or ("graph" if device == "cuda" else "latency"),
        budget_s=budget,
        seed=seed,
        directory=output or guarded(lambda: directory_of(None, "scaling")),
    )
    options = guarded(lambda: options_of(asked, sys.argv[1:]))
    counts = guarded(lambda: _counts(ranks, device))
    options = guarded(lambda: _scaled(options, weak, strong, buffers, counts))
    world = guarded(lambda: start.joined_world(os.environ, None))
    if world is not None:
        if ranks is not None and world.size not in counts:
            guarded(lambda: _refuse_count(world.size, counts))
        run_bench(options, None, lambda found, code: finish.finish(found, code, console(), report))
    screen, directory = console(), Path(options.directory)
    code = guarded(lambda: points.run(options, counts, screen.print))
    raise typer.Exit(finish.finish(directory, code, screen, report))


def _counts(ranks: str | None, device: str) -> list[int]:
    if ranks is not None:
        counts = points.parse_counts(ranks)
        check_ranks(max(counts))
        return counts
    return points.default_counts(start.ranks_to_start(None, device, 8))


def _refuse_count(size: int, counts: list[int]) -> None:
    raise CaseError(f"{size} ranks were started, and --ranks {','.join(map(str, counts))} has no {size}.")


def _scaled(options: Options, weak: bool, strong: bool, buffers: str, counts: list[int]) -> Options:
    kinds = points.kinds_of(weak, strong)
    if not set(options.collectives) <= set(vocabulary.COLLECTIVES):
        raise CaseError("scaling is about collectives: leave pingpong and mixture of experts out.")
    if buffers not in points.BUFFERS:
        raise CaseError(f"unknown --buffers {buffers!r}: choose from {', '.join(points.BUFFERS)}.")
    options = msgspec.structs.replace(options, scaling=kinds)
    room = points.room_bytes(options, counts) if buffers == "largest" else 0
    return msgspec.structs.replace(options, room_bytes=room)
