"""The `unisono` command. Exit codes: 0 success, 1 a failure (or a gate not passed), 2 a wrong command line,
130 interrupted."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from unisono.bench.cases import CaseError
from unisono.records import stats

from . import finish, resolve
from .bench import ab, bench
from .common import Output, WithReport, check_ranks, console, guarded, readable, refuse, run_bench
from .output import check_writable, directory_of
from .scaling import scaling

app = typer.Typer(
    help="Collective communication, measured and verified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(bench)
app.command()(ab)
app.command()(scaling)


def _version(asked: bool) -> None:
    if asked:
        import unisono

        print(unisono.__version__)
        raise typer.Exit


def _cmake_dir(asked: bool) -> None:
    if asked:
        from unisono import _core

        print(Path(_core.__file__).parent / "lib" / "cmake" / "unisono")  # where wheels install it
        raise typer.Exit


@app.callback()
def unisono(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it, and exit.")
    ] = False,
    cmake_dir: Annotated[
        bool,
        typer.Option(
            "--cmake-dir",
            callback=_cmake_dir,
            is_eager=True,
            help="Print the folder of the CMake package: cmake -Dunisono_DIR=$(unisono --cmake-dir).",
        ),
    ] = False,
) -> None:
    pass


@app.command()
def tune(
    device: Annotated[str, typer.Option("--device", help="cpu, or cuda: rank r on GPU r.")] = "cpu",
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Ranks to start; default: one a core, 2 to 8, or one a GPU.")
    ] = None,
    collective: Annotated[
        str | None,
        typer.Option("--collective", "--collectives", help="List; default: all that have a choice."),
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", help="Seconds for checks and measurements together.")
    ] = 180.0,
    shapes: Annotated[
        bool,
        typer.Option(
            "--shapes",
            help="On GPUs: also kernels in several shapes (blocks, threads, pieces); 5 times the cells.",
        ),
    ] = False,
    nodes: Annotated[
        bool,
        typer.Option("--nodes", help="Algorithms between nodes: start it on several nodes, as with mpiexec."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-O",
            "--output",
            "--out",
            help="The table; default: UNISONO_PLAN, else unisono/plan.json in the user's cache.",
        ),
    ] = None,
    kept: Annotated[
        Path | None,
        typer.Option("--records", help="Folder for what was measured, for `unisono report`; default: none."),
    ] = None,
) -> None:
    """Measures every algorithm here and writes the table by which the library chooses among them, for this
    number of ranks. Tables for other numbers of ranks stay."""
    from unisono import records, tables
    from unisono.bench import tune

    check_ranks(ranks)
    path = output or tables.path()
    if path is None:
        refuse(CaseError("this user has no home for the table: name a file with --output, or UNISONO_PLAN."))
    if path.is_dir():
        refuse(CaseError(f"{path} is a directory: name a file with --output."))
    guarded(lambda: check_writable(path.parent))
    screen = console()

    def write(directory: Path, code: int) -> int:
        if not any(directory.rglob(records.FILE_NAME)):
            screen.print("The ranks ended before anything was measured; they say above why.", style="red")
            return finish.FAILED
        found = records.read(directory)
        result = finish.exit_code(found, code)
        if result == finish.OK and nodes and not found.runs[0].nodes:
            screen.print("The ranks are on one node: start --nodes on several, as with mpiexec.", style="red")
            return finish.FAILED
        if result == finish.OK:
            run = found.runs[0]
            across = len(set(run.nodes)) if nodes else 0
            entries = tune.choose(found.results, device)
            guarded(lambda: tune.write(path, run.ranks, run.machine, entries, across))
            where = f"{run.ranks} {'GPUs' if device == 'cuda' else 'ranks'}"
            where += f" on {across} nodes" if across else ""
            again = "remove it for the built-in plan"
            screen.print(f"plan for {where}: {finish.shown(path)} ({again})", soft_wrap=True)
            if few := tune.brief(found.results):
                share = f"of {few} cases the fastest was visited fewer than six times"
                screen.print(f"{share}: with a longer --budget the table is surer.")
        else:
            screen.print("The table was not written: the run did not end in good order.", style="red")
        return result

    with tempfile.TemporaryDirectory(prefix="unisono-tune-") as scratch:
        measured = guarded(lambda: directory_of(kept)) if kept else Path(scratch) / "run"
        options = guarded(
            lambda: resolve.tune_options(collective, budget, measured, sys.argv[1:], device, shapes, nodes)
        )
        run_bench(options, ranks, write)


@app.command()
def links(output: Output = None, report: WithReport = True) -> None:
    """Measures what the links between the GPUs carry: copy engines, loads, stores; pairs, ring, all pairs."""
    from unisono.bench import links
    from unisono.bench.device import HangError
    from unisono.report import terminal

    devices = guarded(links.gpus)
    directory = guarded(lambda: directory_of(output, "links"))
    screen = console()
    with screen.status("links") as status:

        def show(doing: str) -> None:
            status.update(Text(f"links: {doing}"))

        found, failed = guarded(lambda: links.run(devices, directory, sys.argv[1:], show))
    for table in terminal.link_tables(found):
        screen.print(table)
    if failed is not None:
        screen.print(f"unisono links: {failed}", style="red", soft_wrap=True)
    written = finish.show_report(directory, screen) if report else True
    if isinstance(failed, HangError):
        screen.file.flush()
        os._exit(finish.FAILED)  # the driver would wait for the hung GPU
    raise typer.Exit(finish.OK if failed is None and written else finish.FAILED)


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
    },
    options_metavar="-n RANKS [--nodes NODES] PROGRAM [ARGS]...",
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

    if context.args and context.args[0].startswith("-"):
        refuse(
            CaseError(
                f"unisono run has no option {context.args[0]}: it has -n and --nodes, and what follows "
                "is the program (python -m ... for a module)."
            )
        )
    raise typer.Exit(guarded(lambda: launch.run_command(ranks, context.args, nodes=nodes)))


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Directory of a run, or of several to merge.")],
    output: Annotated[
        Path | None, typer.Option("-O", "--output", "--out", help="Directory to write to; default: the same.")
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
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Times that differ by a smaller share are the SAME.")
    ] = stats.TOLERANCE,
    everything: Annotated[bool, typer.Option("--all", help="Also cases that are SAME or UNCLEAR.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
) -> None:
    """Says for each case whether B is FASTER or SLOWER than A, the SAME, or UNCLEAR. Exits 1 if they have no
    case in common."""
    from unisono.report import compare as comparing

    found = readable(lambda: comparing.compare(before, after, backend, tolerance))
    if markdown:
        print(comparing.render_markdown(found))
    else:
        console().print(comparing.render(found, everything))
    raise typer.Exit(found.exit_code)


@app.command()
def gate(
    directory: Annotated[Path, typer.Argument(help="Directory of a run, or of several.")],
    backend: Annotated[str, typer.Option("--backend", help="The backend to judge.")] = "unisono",
    against: Annotated[
        str, typer.Option("--against", help="A backend, or best: every other one of each case.")
    ] = "best",
    min_ratio: Annotated[
        float, typer.Option("--min-ratio", help="The other's time over the backend's own must reach this.")
    ] = 1.0,
    min_judged: Annotated[
        float,
        typer.Option(
            "--min-judged",
            help="Least share of cases, 0 to 1, that can be judged: with a peer and enough visits.",
        ),
    ] = 0.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
) -> None:
    """Exits 1 and lists the cases in which the backend is confidently below the ratio."""
    from unisono.report import gate as gating

    found = readable(lambda: gating.gate(directory, backend, against, min_ratio, min_judged))
    if markdown:
        print(gating.render_markdown(found))
    else:
        console().print(gating.render(found))
    raise typer.Exit(found.exit_code)


@app.command()
def schema() -> None:
    """Prints the JSON Schema of a line of records.jsonl."""
    from unisono import records

    print(json.dumps(records.json_schema(), indent=2))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
