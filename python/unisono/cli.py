"""The `unisono` command. Exit codes: 0 good, 1 something failed (or a gate is not passed), 2 the command
itself is wrong, 130 interrupted."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from unisono.bench import finish, request
from unisono.bench.cases import (
    CUDA_MODES,
    DTYPES,
    KNOWN,
    MEMORIES,
    MODES,
    OPS,
    PLACEMENTS,
    STREAMS,
    WIRES,
)
from unisono.bench.options import PRESETS
from unisono.bench.pairs import ALL, PATTERNS
from unisono.cli_run import check_ranks, console, guarded, readable, run_bench
from unisono.cli_scaling import scaling

app = typer.Typer(
    help="Collective communication, measured and verified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_BENCH = "What to measure"
_HOW = "How to measure"


@app.command()
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
        str, typer.Option("--preset", "-p", help="; ".join(f"{n}: {p.about}" for n, p in PRESETS.items()))
    ] = "quick",
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
    backend: Annotated[
        str | None,
        typer.Option("--backend", "--backends", help="List, or all. unisono:ALGORITHM forces one."),
    ] = None,
    collective: Annotated[
        str | None,
        typer.Option(
            "--collective",
            "--collectives",
            help="List, instead of naming them as arguments.",
            rich_help_panel=_BENCH,
        ),
    ] = None,
    fabric: Annotated[
        bool,
        typer.Option("--fabric", help="All-to-all over libfabric, by channels and memory, beside MPI."),
    ] = False,
    provider: Annotated[
        str | None, typer.Option("--provider", help="With --fabric: libfabric's name, like tcp or shm.")
    ] = None,
    channels: Annotated[
        int | None,
        typer.Option("--channels", help="With --fabric: endpoints a rank; default: 4, or the NICs."),
    ] = None,
    wire: Annotated[
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
        int, typer.Option("-f", "--factor", "--stepfactor", help="From size to size.", rich_help_panel=_BENCH)
    ] = 2,
    sizes: Annotated[
        str | None, typer.Option("--sizes", help="Explicit list, like 8,4K,25M.", rich_help_panel=_BENCH)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--dtype",
            "--datatype",
            help=f"List of {', '.join(DTYPES)}, or all.",
            rich_help_panel=_BENCH,
        ),
    ] = None,
    op: Annotated[
        str | None,
        typer.Option("-o", "--op", help=f"List of {', '.join(OPS)}, or all.", rich_help_panel=_BENCH),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option("--placement", help=f"List of {', '.join(PLACEMENTS)}.", rich_help_panel=_BENCH),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help=f"List of {', '.join(MEMORIES)}.", rich_help_panel=_BENCH)
    ] = None,
    pattern: Annotated[
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
    workload: Annotated[
        str | None,
        typer.Option("--workload", help="Real models by name, all, or none.", rich_help_panel=_BENCH),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            help=f"List of {', '.join(MODES)}; on GPUs of {', '.join(CUDA_MODES)}.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    iters: Annotated[
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
        typer.Option("-c", "--check", help="0 leaves out the checks of the results.", rich_help_panel=_HOW),
    ] = 1,
    budget: Annotated[
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
    output: Annotated[
        Path | None,
        typer.Option(
            "-O", "--output", "--out", help="Directory of records and report; default: a new one here."
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option(help="Write the report too, not only the records (`unisono report` makes it later)."),
    ] = True,
) -> None:
    """Measures every collective on every backend, checks the results and writes a report."""
    check_ranks(ranks)
    asked = request.Asked(
        preset=preset,
        device=device,
        to_memory_limit=to_memory_limit,
        one_process=one_process,
        backends=backend,
        wires=wire,
        collectives=guarded(lambda: request.collectives_of(named, collective)),
        begin=begin,
        end=end,
        factor=factor,
        sizes=sizes,
        dtypes=dtype,
        ops=op,
        placements=placement,
        memories=memory,
        modes=mode,
        patterns=pattern,
        pairs=pairs,
        streams=streams,
        workloads=workload,
        iterations=iters,
        warmup=warmup,
        check=check,
        budget_s=budget,
        width=width,
        seed=seed,
        directory=output,
        fabric=fabric,
        provider=provider,
        channels=channels,
    )
    options = guarded(lambda: request.options_of(asked, sys.argv[1:]))
    run_bench(options, ranks, lambda directory, code: finish.finish(directory, code, console(), report))


app.command()(scaling)


@app.command()
def tune(
    device: Annotated[str, typer.Option("--device", help="cpu, or cuda: rank r on GPU r.")] = "cpu",
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help="Ranks to start; default: one a core, 2 to 8, or one a GPU."),
    ] = None,
    collective: Annotated[
        str | None,
        typer.Option("--collective", "--collectives", help="List; default: all that have a choice."),
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", help="Seconds for checks and measurements together.")
    ] = 180.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "-O", "--output", "--out", help="The table; default: UNISONO_PLAN, else the user's cache."
        ),
    ] = None,
) -> None:
    """Measures every algorithm here and writes the table by which the library chooses among them."""
    from unisono.bench import records, tune
    from unisono.communicator import plan_path

    check_ranks(ranks)
    path = output or plan_path()
    screen = console()

    def write(directory: Path, code: int) -> int:
        found = records.read(directory)
        result = finish.exit_code(found, code)
        if result == finish.OK:
            run = found.runs[0]
            tune.write(path, run.ranks, run.machine, tune.choose(found.results))
            where = f"{run.ranks} {'GPUs' if device == 'cuda' else 'ranks'}"
            screen.print(f"plan for {where}: {finish.shown(path)}", soft_wrap=True)
        else:
            screen.print("The table was not written: the run did not end in good order.", style="red")
        return result

    with tempfile.TemporaryDirectory(prefix="unisono-tune-") as scratch:
        options = guarded(
            lambda: request.tune_options(collective, budget, Path(scratch) / "run", sys.argv[1:], device)
        )
        run_bench(options, ranks, write)


@app.command()
def links(
    output: Annotated[
        Path | None,
        typer.Option(
            "-O", "--output", "--out", help="Directory of records and report; default: a new one here."
        ),
    ] = None,
    report: Annotated[bool, typer.Option(help="Write the report too, not only the records.")] = True,
) -> None:
    """Measures what the links between the GPUs carry: copy engines, loads, stores; pairs, ring, all pairs."""
    from unisono.bench import links

    devices = guarded(links.gpus)
    directory = guarded(lambda: request.directory_of(output, "links"))
    raise typer.Exit(links.run(devices, directory, sys.argv[1:], console(), report))


@app.command()
def info() -> None:
    """Shows the machine, and which backends can run here and why not."""
    from unisono.bench import info

    info.show(console())


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def run(
    context: typer.Context,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks to start.")],
    nodes: Annotated[
        int, typer.Option("--nodes", help="Virtual nodes, to try what runs across machines on one.")
    ] = 1,
) -> None:
    """Starts a program as ranks on this machine: `unisono run -n 4 train.py`."""
    from unisono import launch

    raise typer.Exit(guarded(lambda: launch.run_command(ranks, context.args, nodes=nodes)))


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Of a run, or of several: their records merge.")],
    output: Annotated[
        Path | None, typer.Option("-O", "--output", "--out", help="Where to write it; default: there.")
    ] = None,
) -> None:
    """Makes report.html, report.md and the plots again from the records."""
    from unisono import report

    for path in readable(lambda: report.build(directory, output)):
        print(finish.shown(path))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Directory of one run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Directory of the other.")],
    backend: Annotated[str | None, typer.Option("--backend", help="Only this one.")] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", help="What differs by less is SAME.")] = 0.02,
    everything: Annotated[bool, typer.Option("--all", help="Also what is SAME or UNCLEAR.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
) -> None:
    """Says for each case whether B is FASTER or SLOWER than A, the SAME, or UNCLEAR."""
    from unisono.report import compare as comparing

    found = readable(lambda: comparing.compare(before, after, backend, tolerance))
    if markdown:
        print(comparing.render_markdown(found))
    else:
        console().print(comparing.render(found, everything))


@app.command()
def gate(
    directory: Annotated[Path, typer.Argument(help="Of a run, or of several.")],
    backend: Annotated[str, typer.Option("--backend", help="The backend to judge.")] = "unisono",
    against: Annotated[
        str, typer.Option("--against", help="A backend, or best: the fastest other one of each case.")
    ] = "best",
    min_ratio: Annotated[
        float, typer.Option("--min-ratio", help="The other's time over the backend's own must reach this.")
    ] = 1.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
) -> None:
    """Exits 1 and lists the cases in which the backend is confidently below the ratio."""
    from unisono.report import gate as gating

    found = readable(lambda: gating.gate(directory, backend, against, min_ratio))
    if markdown:
        print(gating.render_markdown(found))
    else:
        console().print(gating.render(found))
    raise typer.Exit(found.exit_code)


@app.command()
def schema() -> None:
    """Prints the JSON Schema of a line of records.jsonl."""
    from unisono.bench import records

    print(json.dumps(records.schema(), indent=2))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
