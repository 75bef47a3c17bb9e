"""The options of `unisono bench`. The command line is made from the class Asked."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from unisono.bench import matmul, norm
from unisono.bench.buffers import PAGE
from unisono.bench.moe import EXPERTS, HIDDEN, TOP_K
from unisono.bench.mpis import NAMES
from unisono.bench.options import PRESETS
from unisono.bench.pairs import ALL
from unisono.records.vocabulary import (
    CUDA_MODES,
    DTYPES,
    INPUTS,
    KNOWN,
    LAYOUTS,
    MEMORIES,
    MODES,
    OPS,
    PATTERNS,
    PLACEMENTS,
    QUANTS,
    ROUTINGS,
    STREAMS,
    WIRES,
)

from .common import Output, WithReport


def _what(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="What to measure")


def _moe(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Mixture of experts", **more)


def _how(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="How to measure", **more)


def _listed(usual: Mapping[str, Iterable[object]]) -> str:
    cpu, cuda = (",".join(map(str, usual[device])) for device in ("cpu", "cuda"))
    return f"{cpu}; on GPUs {cuda}"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line of `unisono bench`. None: the user left the option out."""

    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COLLECTIVE]...",
            help=f"Of {', '.join(KNOWN)}; default: all collectives.",
            show_default=False,
        ),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            "-p",
            help="; ".join([*(f"{n}: {p.about}" for n, p in PRESETS.items()), "default: quick"]),
        ),
    ] = None
    device: Annotated[
        str, typer.Option("--device", help="cpu, or cuda: rank r on GPU r, torch tensors as buffers.")
    ] = "cpu"
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", help="Ranks to start; default: one a core, 2 to 8, or one a GPU. Not under a launcher."
        ),
    ] = None
    one_process: Annotated[
        bool, typer.Option("--one-process", help="On GPUs: the ranks are threads of one process.")
    ] = False
    backends: Annotated[
        str | None,
        typer.Option(
            "--backend",
            "--backends",
            help="List, or all but those to be named (fabric; on GPUs mpi). unisono:ALGORITHM forces one.",
        ),
    ] = None
    mpis: Annotated[
        str | None,
        typer.Option(
            "--mpi",
            help=f"List of {', '.join(NAMES)}: start the ranks under each in turn, and name the backend so.",
        ),
    ] = None
    collectives: Annotated[
        str | None, _what("--collective", "--collectives", help="List, in place of arguments.")
    ] = None
    fabric: Annotated[
        bool, typer.Option("--fabric", help="All-to-all over libfabric, by channels and memory, beside MPI.")
    ] = False
    provider: Annotated[
        str | None, typer.Option("--provider", help="With --fabric: libfabric's name, like tcp or shm.")
    ] = None
    channels: Annotated[
        int | None,
        typer.Option("--channels", help="With --fabric: endpoints a rank; default: 4, or the NICs."),
    ] = None
    wires: Annotated[
        str | None,
        typer.Option(
            "--wire",
            help=f"List of {', '.join(WIRES)}: also all_reduce quantised by these, on GPUs FlashInfer's too.",
        ),
    ] = None
    begin: Annotated[str | None, _what("-b", "--begin", "--minbytes", help="First size, like 8 or 64K.")] = (
        None
    )
    end: Annotated[str | None, _what("-e", "--end", "--maxbytes", help="Last size, like 256M.")] = None
    factor: Annotated[
        int | None, _what("-f", "--factor", "--stepfactor", help="Factor between sizes; default: 2.")
    ] = None
    step: Annotated[
        str | None, _what("-i", "--step", "--stepbytes", help="Step between sizes, in place of -f.")
    ] = None
    sizes: Annotated[str | None, _what("--sizes", help="Explicit list, like 8,4K,25M.")] = None
    dtypes: Annotated[
        str | None, _what("-d", "--dtype", "--datatype", help=f"List of {', '.join(DTYPES)}, or all.")
    ] = None
    ops: Annotated[str | None, _what("-o", "--op", help=f"List of {', '.join(OPS)}, or all.")] = None
    placements: Annotated[str | None, _what("--placement", help=f"List of {', '.join(PLACEMENTS)}.")] = None
    memories: Annotated[str | None, _what("--memory", help=f"List of {', '.join(MEMORIES)}.")] = None
    offsets: Annotated[
        str | None,
        _what(
            "--offset",
            help=f"List of bytes from the start of a page, below {PAGE}, at which buffers begin; default: 0.",
        ),
    ] = None
    inputs: Annotated[
        str | None,
        _what(
            "--inputs",
            help=f"List of {', '.join(INPUTS)}: as the last call left them, or written by their rank before "
            "each call, as programs do; default: kept.",
        ),
    ] = None
    patterns: Annotated[
        str | None, _what("--pattern", help=f"Of pingpong: list of {', '.join(PATTERNS)}.")
    ] = None
    pairs: Annotated[
        str,
        _what(
            "--pairs",
            help="Of pingpong: all (each alone), a list like 0-1,0-3, or halves (r with r + n/2, at once).",
        ),
    ] = ALL
    streams: Annotated[
        str | None,
        _what(
            "--streams",
            help=f"Of all_to_all: list of {', '.join(STREAMS)}; all but own are built of sends and receives.",
        ),
    ] = None
    moe: Annotated[
        bool, _moe("--moe", help="Dispatch, combine and both in a row, in place of collectives.")
    ] = False
    tokens: Annotated[
        str | None, _moe("--tokens", help="List, of each rank; default: 1,4,16,... to 4096.")
    ] = None
    hidden: Annotated[
        str | None,
        _moe("--hidden", help=f"List of elements of a token; default: {HIDDEN}; of a row: {norm.HIDDEN}."),
    ] = None
    experts: Annotated[
        int | None, _moe("--experts", min=1, help=f"Of all ranks; default: {EXPERTS}, as DeepSeek-V3.")
    ] = None
    top_k: Annotated[str | None, _moe("--top-k", help=f"List of experts of a token; default: {TOP_K}.")] = (
        None
    )
    routings: Annotated[
        str | None, _moe("--routing", help=f"List of {', '.join(ROUTINGS)}; default: {ROUTINGS[0]}.")
    ] = None
    layouts: Annotated[
        str | None,
        _moe("--layout", help=f"Of received rows, list of {', '.join(LAYOUTS)}; default: {LAYOUTS[0]}."),
    ] = None
    norm: Annotated[
        bool,
        _what("--norm", help="An all_reduce, the residual and a norm in one call, in place of collectives."),
    ] = False
    quants: Annotated[
        str | None,
        _what("--quant", help=f"Of --norm: list of {', '.join(QUANTS)}; default: none, and one case more."),
    ] = None
    matmul: Annotated[
        bool,
        _what("--matmul", help="Matmuls with their collective, and both alone, in place of collectives."),
    ] = False
    rows: Annotated[
        str | None, _what("--rows", help=f"Of --matmul: list; default: {_listed(matmul.ROWS)}.")
    ] = None
    shapes: Annotated[
        str | None,
        _what(
            "--shape",
            help=f"Of --matmul: list of {', '.join(matmul.NAMED)} (divided among the ranks, except square), "
            f"or KxN of a rank; default: {_listed(matmul.SHAPES)}.",
        ),
    ] = None
    workloads: Annotated[
        str | None, _what("--workload", help="Real models, measured too: by name, all, or none.")
    ] = None
    modes: Annotated[
        str | None, _how("--mode", help=f"List of {', '.join(MODES)}; on GPUs of {', '.join(CUDA_MODES)}.")
    ] = None
    iterations: Annotated[
        int | None,
        _how("-n", "--iters", help="Samples of every case; default: until the interval is narrow enough."),
    ] = None
    warmup: Annotated[
        int | None,
        _how(
            "-w", "--warmup", "--warmup_iters", help="Most untimed calls before a batch; one is always made."
        ),
    ] = None
    check: Annotated[
        int, _how("-c", "--check", min=0, max=1, help="0 turns the checks of the results off.")
    ] = 1
    budget_s: Annotated[
        float | None, _how("--budget", help="Seconds for checks and measurements together.")
    ] = None
    launches: Annotated[
        int | None,
        _how(
            "--launches",
            min=1,
            max=1000,
            help="Start the ranks so many times, with --mpi under each; default: 1, with several MPIs 2.",
        ),
    ] = None
    width: Annotated[
        float | None, _how("--width", help="Stop at this width of the median's 95 % interval, 0.05 is 5 %.")
    ] = None
    seed: Annotated[int | None, _how("--seed", help="Seed of the order of cases and of the data.")] = None
    to_memory_limit: Annotated[
        bool,
        _what(
            "--to-memory-limit",
            help="On GPUs: grow each collective from 1G (or -b) until the memory is full, to within 2 %.",
        ),
    ] = False
    directory: Output = None
    report: WithReport = True


def signature(*first: inspect.Parameter, without: Sequence[str] = ()) -> inspect.Signature:
    """Returns a signature with `first`, then a parameter for each field of Asked that is not `without`. Typer
    makes the command line from it."""
    hints = get_type_hints(Asked, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            *first,
            *(
                inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name])
                for f in fields(Asked)
                if f.name not in without
            ),
        ]
    )
