"""`unisono bench`: every collective on every backend."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from unisono.bench import finish, request
from unisono.bench.cases import CUDA_MODES, DTYPES, KNOWN, MEMORIES, MODES, OPS, PLACEMENTS, STREAMS, WIRES
from unisono.bench.options import PRESETS
from unisono.bench.pairs import ALL, PATTERNS
from unisono.cli_run import Output, WithReport, check_ranks, console, guarded, run_bench

_BENCH = "What to measure"
_HOW = "How to measure"


def bench(
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COLLECTIVE]...",
            help=f"Of {', '.join(KNOWN)}; default: all collectives.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            "-p",
            help="; ".join([*(f"{n}: {p.about}" for n, p in PRESETS.items()), "default: quick"]),
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="cpu, or cuda: rank r on GPU r, torch tensors as buffers.")
    ] = "cpu",
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", help="Ranks to start; default: one a core, 2 to 8, or one a GPU. Not under a launcher."
        ),
    ] = None,
    one_process: Annotated[
        bool, typer.Option("--one-process", help="On GPUs: the ranks are threads of one process.")
    ] = False,
    backends: Annotated[
        str | None,
        typer.Option(
            "--backend",
            "--backends",
            help="List, or all but those to be named (fabric; on GPUs mpi). unisono:ALGORITHM forces one.",
        ),
    ] = None,
    collectives: Annotated[
        str | None,
        typer.Option(
            "--collective",
            "--collectives",
            help="List, instead of naming them as arguments.",
            rich_help_panel=_BENCH,
        ),
    ] = None,
    fabric: Annotated[
        bool, typer.Option("--fabric", help="All-to-all over libfabric, by channels and memory, beside MPI.")
    ] = False,
    provider: Annotated[
        str | None, typer.Option("--provider", help="With --fabric: libfabric's name, like tcp or shm.")
    ] = None,
    channels: Annotated[
        int | None,
        typer.Option("--channels", help="With --fabric: endpoints a rank; default: 4, or the NICs."),
    ] = None,
    wires: Annotated[
        str | None,
        typer.Option(
            "--wire", help=f"List of {', '.join(WIRES)}: also unisono's all_reduce quantised by these."
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "-b", "--begin", "--minbytes", help="First size, like 8 or 64K.", rich_help_panel=_BENCH
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option("-e", "--end", "--maxbytes", help="Last size, like 256M.", rich_help_panel=_BENCH),
    ] = None,
    factor: Annotated[
        int | None,
        typer.Option(
            "-f", "--factor", "--stepfactor", help="From size to size; default: 2.", rich_help_panel=_BENCH
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            "-i", "--step", "--stepbytes", help="From size to size, instead of -f.", rich_help_panel=_BENCH
        ),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option("--sizes", help="Explicit list, like 8,4K,25M.", rich_help_panel=_BENCH)
    ] = None,
    dtypes: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--dtype",
            "--datatype",
            help=f"List of {', '.join(DTYPES)}, or all.",
            rich_help_panel=_BENCH,
        ),
    ] = None,
    ops: Annotated[
        str | None,
        typer.Option("-o", "--op", help=f"List of {', '.join(OPS)}, or all.", rich_help_panel=_BENCH),
    ] = None,
    placements: Annotated[
        str | None,
        typer.Option("--placement", help=f"List of {', '.join(PLACEMENTS)}.", rich_help_panel=_BENCH),
    ] = None,
    memories: Annotated[
        str | None, typer.Option("--memory", help=f"List of {', '.join(MEMORIES)}.", rich_help_panel=_BENCH)
    ] = None,
    patterns: Annotated[
        str | None,
        typer.Option(
            "--pattern", help=f"Of pingpong: list of {', '.join(PATTERNS)}.", rich_help_panel=_BENCH
        ),
    ] = None,
    pairs: Annotated[
        str,
        typer.Option(
            "--pairs",
            help="Of pingpong: all (each alone), a list like 0-1,0-3, or halves (r with r + n/2, at once).",
            rich_help_panel=_BENCH,
        ),
    ] = ALL,
    streams: Annotated[
        str | None,
        typer.Option(
            "--streams",
            help=f"Of all_to_all: list of {', '.join(STREAMS)}; all but own are built of sends and receives.",
            rich_help_panel=_BENCH,
        ),
    ] = None,
    workloads: Annotated[
        str | None,
        typer.Option(
            "--workload", help="Real models, measured too: by name, all, or none.", rich_help_panel=_BENCH
        ),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            "--mode",
            help=f"List of {', '.join(MODES)}; on GPUs of {', '.join(CUDA_MODES)}.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--iters",
            help="Samples of every case; default: until the interval is narrow enough.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            "-w",
            "--warmup",
            "--warmup_iters",
            help="Untimed calls before a batch, at most; at least one.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    check: Annotated[
        int,
        typer.Option(
            "-c",
            "--check",
            min=0,
            max=1,
            help="0 leaves out the checks of the results.",
            rich_help_panel=_HOW,
        ),
    ] = 1,
    budget_s: Annotated[
        float | None,
        typer.Option("--budget", help="Seconds for checks and measurements together.", rich_help_panel=_HOW),
    ] = None,
    width: Annotated[
        float | None,
        typer.Option(
            "--width",
            help="Stop at this width of the median's 95 % interval, 0.05 is 5 %.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of the order of cases and of the data.", rich_help_panel=_HOW),
    ] = None,
    to_memory_limit: Annotated[
        bool,
        typer.Option(
            "--to-memory-limit",
            help="On GPUs: double each collective from 1G (or -b) until the memory is full.",
            rich_help_panel=_BENCH,
        ),
    ] = False,
    directory: Output = None,
    report: WithReport = True,
) -> None:
    """Measures every collective on every backend, checks the results and writes a report."""
    given = {name: value for name, value in locals().items() if name not in ("named", "ranks", "report")}
    check_ranks(ranks)
    given["collectives"] = guarded(lambda: request.collectives_of(named, collectives))
    options = guarded(lambda: request.options_of(request.Asked(**given), sys.argv[1:]))
    run_bench(
        options,
        ranks,
        lambda found, code: finish.finish(found, code, console(), report, directory is not None),
    )
