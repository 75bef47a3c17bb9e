"""Makes the options of a run from the command line: a preset, and the options that override it."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from unisono.bench import cases, fabric, mpis, pairs, provenance, tune, workloads
from unisono.bench.backends import base, norms
from unisono.bench.buffers import PAGE
from unisono.bench.cases import CaseError
from unisono.bench.norm import Grid as NormGrid
from unisono.bench.options import CUDA_DEFAULT_MODES, CUDA_PRESETS, FABRIC_PRESET, PRESETS, Options, Preset
from unisono.bench.schedule import Limits
from unisono.records import vocabulary
from unisono.records.vocabulary import MATMUL, MATMULS, MOES, NORM, PATTERNS, PLACEMENTS

from . import matmul, moe, norm
from .asked import Asked
from .output import directory_of

DTYPE_NAMES = {  # of nccl-tests
    "float": "f32",
    "double": "f64",
    "half": "f16",
    "bfloat16": "bf16",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
}
DEFAULT_PRESET = "quick"
MOST_BUDGET_S = 1e9
LIMIT_SIZES = [1 << 30]  # where --to-memory-limit begins


def options_of(asked: Asked, command: Sequence[str]) -> Options:
    """Returns the options of a run. Raises CaseError if something is unknown, or if options contradict each
    other."""
    _refuse_contradictions(asked)
    on_gpu = asked.device == "cuda"
    if asked.fabric:
        fabric.prepare_environment(os.environ, asked.provider, asked.channels)
    if os.environ.get("UNISONO_LANE", "host") not in ("", "host"):
        raise CaseError("the bench measures the host lane, or with --fabric the other: unset UNISONO_LANE.")
    name = asked.preset or DEFAULT_PRESET
    preset = FABRIC_PRESET if asked.fabric else (CUDA_PRESETS if on_gpu else PRESETS)[name]
    modes = list(CUDA_DEFAULT_MODES if on_gpu else ("latency",) if asked.fabric else vocabulary.MODES)
    sizes, memories = _sizes(asked, preset), list(preset.memories)
    if asked.to_memory_limit:
        sizes = LIMIT_SIZES if asked.begin is None and asked.sizes is None else sizes[:1]
        memories = ["plain"]
    memories = _names("memory", asked.memories, list(vocabulary.MEMORIES), memories)
    models = asked.workloads
    if models is None:  # a run that the user has narrowed down measures no models
        narrowed = (
            *(_listed(asked), asked.begin, asked.end, asked.sizes),
            *(asked.dtypes, asked.ops, asked.offsets, asked.inputs),
        )
        whole = not (asked.moe or asked.norm or asked.matmul) and all(value is None for value in narrowed)
        models = ",".join(preset.workloads) if whole else "none"
    modes = _names("mode", asked.modes, list(vocabulary.modes_of(asked.device)), modes)
    collectives, dtypes = _collectives(asked), _dtypes(asked.dtypes, preset)
    inputs = _inputs(asked, collectives)
    if "written" in inputs:
        if asked.modes is not None and modes != ["latency"]:
            raise CaseError(
                "--inputs written: only calls one by one have a moment before: choose --mode latency."
            )
        modes = ["latency"]
    if asked.one_process and not set(modes) <= set(CUDA_DEFAULT_MODES):
        raise CaseError("--one-process has the GPU's clock only: choose --mode graph, events or both.")
    backends = _backends(
        asked.backends or ("fabric,mpi" if asked.fabric else None),
        asked.device,
        collectives,
        workloads.collectives(workloads.split_workloads(models, asked.device)),
    )
    peers = asked.backends is None and asked.device == "cuda"
    chosen_mpis = tuple(_names("mpi", asked.mpis, list(mpis.NAMES), []))
    if chosen_mpis and "mpi" not in backends:
        backends.append("mpi")
    return Options(
        directory=str(directory_of(asked.directory)),
        command=provenance.command(command),
        preset=None if asked.fabric else name,
        backends=list(dict.fromkeys(backends + _wires(asked.wires, collectives, peers))),
        collectives=collectives,
        moe=moe.grid_of(asked, collectives, dtypes if asked.dtypes is not None else None, modes),
        norm=norm.grid_of(asked, collectives, sizes, dtypes, memories, modes),
        matmul=matmul.grid_of(asked, collectives, dtypes, modes),
        patterns=tuple(_names("pattern", asked.patterns, list(PATTERNS), list(PATTERNS))),
        pairs=asked.pairs,
        streams=tuple(_names("streams", asked.streams, list(vocabulary.STREAMS), [vocabulary.OWN])),
        sizes=sizes,
        dtypes=dtypes,
        ops=_names("op", asked.ops, list(vocabulary.OPS), list(preset.ops)),
        placements=_names("placement", asked.placements, list(PLACEMENTS), list(preset.placements)),
        memories=memories,
        offsets=_offsets(asked, collectives),
        inputs=inputs,
        modes=modes,
        fabric=asked.fabric,
        threads=int(asked.one_process),  # the number is known at the start of the ranks
        workloads=workloads.split_workloads(models, asked.device),
        device=asked.device,
        to_memory_limit=asked.to_memory_limit,
        limits=_limits(asked, preset),
        mpis=chosen_mpis,
        launches=asked.launches or (2 if len(chosen_mpis) > 1 else 1),
        seed=secrets.randbits(31) if asked.seed is None else asked.seed,
        cores=provenance.usable_cores(),
        check=asked.check > 0,
        terminal_columns=shutil.get_terminal_size().columns if sys.stdout.isatty() else None,
    )


def _refuse_contradictions(asked: Asked) -> None:
    if asked.preset is not None and asked.preset not in PRESETS:
        raise CaseError(f"unknown preset {asked.preset!r}: choose from {', '.join(PRESETS)}.")
    if asked.device not in vocabulary.DEVICES:
        raise CaseError(f"unknown device {asked.device!r}: choose from {', '.join(vocabulary.DEVICES)}.")
    on_gpu = asked.device == "cuda"
    if asked.to_memory_limit and not on_gpu:
        raise CaseError("--to-memory-limit fills the memory of GPUs: add --device cuda.")
    if asked.one_process and not on_gpu:
        raise CaseError("--one-process is for GPUs, one a thread: add --device cuda.")
    if asked.to_memory_limit and vocabulary.PINGPONG in _collectives(asked):
        raise CaseError("--to-memory-limit is about collectives: leave pingpong out.")
    if asked.to_memory_limit and (useless := _useless_to_the_limit(asked)):
        raise CaseError(
            "--to-memory-limit grows one size, and checks and times it in its own way: leave "
            f"{', '.join(useless)} out."
        )
    if asked.iterations is not None and (asked.budget_s is not None or asked.width is not None):
        raise CaseError("-n takes so many samples, whatever --budget and --width say: give -n or these.")
    if asked.fabric and on_gpu:
        raise CaseError("--fabric measures the NICs' lane, --device cuda the GPUs': give one of them.")
    if asked.fabric and asked.preset is not None:
        raise CaseError(
            "--fabric has a preset of its own: leave --preset out; --sizes and --budget change it."
        )
    several = asked.launches is not None and asked.launches > 1
    if asked.to_memory_limit and (several or asked.mpis is not None):
        raise CaseError("--to-memory-limit finds a size, not a time: leave --launches and --mpi out.")
    if asked.mpis is not None and (asked.fabric or asked.one_process):
        raise CaseError("--mpi is for ranks that are processes, without --fabric: leave one of them out.")
    if not asked.fabric and (asked.provider is not None or asked.channels is not None):
        raise CaseError("--provider and --channels are for --fabric: add it.")


def _useless_to_the_limit(asked: Asked) -> list[str]:
    """Returns the options on the command line that --to-memory-limit does not use."""
    options: dict[str, object] = {
        "-e": asked.end,
        "-f": asked.factor,
        "-i": asked.step,
        "all but one of --sizes": "," in (asked.sizes or "") or None,
        "--streams": asked.streams,
        "--placement": asked.placements,
        "--workload": None if asked.workloads == "none" else asked.workloads,
        "--mode": asked.modes,
        "-n": asked.iterations,
        "-w": asked.warmup,
        "-c 0": None if asked.check else 0,
        "--budget": asked.budget_s,
        "--width": asked.width,
    }
    return [name for name, value in options.items() if value is not None]


def tune_options(
    collectives: str | None,
    budget_s: float,
    directory: Path,
    command: Sequence[str],
    device: str = "cpu",
    shaped: bool = False,
    nodes: bool = False,
) -> Options:
    """Returns the options of `unisono tune`: a backend for each algorithm of the collectives, and with
    `shaped` for each shape of its kernels. Raises CaseError."""
    if device not in vocabulary.DEVICES:
        raise CaseError(f"unknown device {device!r}: choose from {', '.join(vocabulary.DEVICES)}.")
    if shaped and device != "cuda":
        raise CaseError("only kernels on GPUs have shapes: --shapes goes with --device cuda.")
    if nodes and device != "cpu":
        raise CaseError("algorithms between nodes are measured on CPUs: leave --device out with --nodes.")
    place = "nodes" if nodes else device
    known = tune.tunable(place)
    chosen = _names("collective", collectives, known, known)
    check_budget(budget_s)
    grid = tune.GRIDS[place]
    return Options(
        directory=str(directory),
        command=provenance.command(command),
        preset=None,
        backends=tune.variants(chosen, place, shaped),
        device=device,
        collectives=chosen,
        sizes=grid.sizes,
        dtypes=[grid.dtype],
        ops=["sum"],
        placements=["out_of_place"],
        memories=grid.memories,
        modes=grid.modes,
        norm=NormGrid(sizes=tuple(grid.sizes), dtypes=(grid.dtype,), quants=vocabulary.QUANTS[:1]),
        workloads=[],
        limits=Limits(budget_s=budget_s, outclassed=grid.outclassed),
        seed=secrets.randbits(31),
        cores=provenance.usable_cores(),
        terminal_columns=shutil.get_terminal_size().columns if sys.stdout.isatty() else None,
    )


def _collectives(asked: Asked) -> list[str]:
    """Returns the collectives to measure. Raises CaseError for an unknown name, and for an option of a
    collective that is not measured."""
    listed = _listed(asked)
    if asked.moe and listed is not None:
        raise CaseError("--moe stands for its three cases: leave it out where collectives are named.")
    if asked.norm and listed is not None:
        raise CaseError(f"--norm stands for {NORM}: leave it out where collectives are named.")
    if asked.matmul and listed is not None:
        raise CaseError("--matmul stands for its three cases: leave it out where collectives are named.")
    if asked.moe or asked.norm or asked.matmul:
        chosen = [*(MOES if asked.moe else ()), *([NORM] if asked.norm else [])]
        chosen += MATMULS if asked.matmul else []
    elif listed is None and asked.fabric:
        chosen = ["all_to_all"]
    elif listed is None or listed.strip() == "all":
        chosen = list(vocabulary.COLLECTIVES)
    else:
        chosen = cases.split_names("collective", listed, list(vocabulary.KNOWN))
    if vocabulary.PINGPONG not in chosen and (asked.patterns is not None or asked.pairs != pairs.ALL):
        raise CaseError("--pattern and --pairs are of a ping-pong: name it, `unisono bench pingpong`.")
    if asked.pairs not in (pairs.ALL, vocabulary.HALVES) and pairs.parse(asked.pairs) is None:
        raise CaseError(f"--pairs {asked.pairs}: write all, halves, or pairs of ranks like 0-1,0-3.")
    if "all_to_all" not in chosen and asked.streams is not None:
        raise CaseError("--streams is of all_to_all: name it, `unisono bench all_to_all`.")
    return chosen


def _listed(asked: Asked) -> str | None:
    """Returns the list of collectives, from the arguments or from the option. Raises CaseError."""
    if asked.named and asked.collectives is not None:
        raise CaseError("the collectives are named twice, as arguments and by --collective: name them once.")
    return ",".join(asked.named) if asked.named else asked.collectives


def _names(kind: str, text: str | None, known: list[str], default: list[str]) -> list[str]:
    return default if text is None else cases.split_names(kind, text, known)


def _backends(text: str | None, device: str, collectives: Sequence[str], of_models: set[str]) -> list[str]:
    wanted = set(collectives)
    matmuls = not {*MATMULS, MATMUL}.isdisjoint(wanted | of_models)
    fused = NORM in wanted or matmuls
    known = base.names_for(
        device, not wanted <= set(cases.SHAPED), not wanted.isdisjoint(MOES), NORM in wanted, matmuls
    )
    if text is None and device == "cuda":
        known = [name for name in known if name != "mpi"]  # only the host clock can time it
    if text is None or text.strip() == "all":
        return base.expanded(known) + ([f"unisono:{norms.APART}"] if fused else [])
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise CaseError(f"no backend given: choose from {', '.join(known)}.")
    beside = [name for name in names if name.startswith(base.OTHER)]
    if beside and (device == "cuda" or fused or not wanted.isdisjoint(MOES)):
        raise CaseError(f"{beside[0]} is measured by collectives on CPUs only: leave it out.")
    if set(names) & set(mpis.NAMES):
        raise CaseError(
            "two MPIs cannot be in one process, since they define the same functions: name them by --mpi "
            f"{','.join(name for name in names if name in mpis.NAMES)}, which starts the ranks under each."
        )
    base.check_names(names)
    return base.expanded(names)


def _wires(text: str | None, collectives: Sequence[str], peers: bool) -> list[str]:
    """Returns the backends that quantise. peers: those of other libraries too."""
    if text is not None and "all_reduce" not in collectives:
        raise CaseError("--wire is about all_reduce: name that collective too.")
    wires = _names("wire", text, list(vocabulary.WIRES), [])
    others = ["flashinfer"] if peers and "fp8" in wires else []
    return [f"unisono:{wire}" for wire in wires] + others


def _dtypes(text: str | None, preset: Preset) -> list[str]:
    if text is None:
        return list(preset.dtypes)
    short = ",".join(DTYPE_NAMES.get(part.strip(), part.strip()) for part in text.split(","))
    return cases.split_names("dtype", short, list(vocabulary.DTYPES))


def _sizes(asked: Asked, preset: Preset) -> list[int]:
    by_range = any(value is not None for value in (asked.begin, asked.end, asked.factor, asked.step))
    if asked.sizes is not None:
        if by_range:
            raise CaseError("--sizes and -b, -e, -f, -i name the sizes twice: give one of them.")
        parts = [part for part in asked.sizes.split(",") if part.strip()]
        if not parts:
            raise CaseError("no sizes given: write a list like 8,64K,1M.")
        return sorted({cases.parse_size(part) for part in parts})
    if not by_range:
        return list(preset.sizes)
    if asked.factor is not None and asked.step is not None:
        raise CaseError("-f and -i say twice how the sizes grow: give one of them.")
    begin = cases.parse_size(asked.begin) if asked.begin is not None else min(preset.sizes)
    end = cases.parse_size(asked.end) if asked.end is not None else max(begin, *preset.sizes)
    step = cases.parse_size(asked.step) if asked.step is not None else None
    return cases.size_range(begin, end, 2 if asked.factor is None else asked.factor, step)


def _offsets(asked: Asked, collectives: Sequence[str]) -> tuple[int, ...]:
    """Returns where in a page the buffers begin. Raises CaseError if the cases have other buffers."""
    if asked.offsets is None:
        return (0,)
    if asked.fabric or asked.device == "cuda" or set(collectives) <= set(cases.SHAPED):
        raise CaseError("--offset places the buffers of collectives in host memory: leave it out here.")
    parts = [part.strip() for part in asked.offsets.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdecimal() or int(part) >= PAGE]
    if not parts or wrong:
        raise CaseError(
            f"--offset {asked.offsets}: write bytes from the start of a page, 0 to {PAGE - 1}, like 0,16,64."
        )
    return tuple(sorted({int(part) for part in parts}))


def _inputs(asked: Asked, collectives: Sequence[str]) -> tuple[str, ...]:
    """Returns what happens to inputs before each call. Raises CaseError if the cases have other buffers."""
    inputs = _names("inputs", asked.inputs, list(vocabulary.INPUTS), ["kept"])
    if inputs != ["kept"] and (asked.device == "cuda" or set(collectives) <= set(cases.SHAPED)):
        raise CaseError("--inputs written is for collectives in host memory: leave it out here.")
    return tuple(inputs)


def _limits(asked: Asked, preset: Preset) -> Limits:
    if asked.iterations is not None and asked.iterations < 1:
        raise CaseError(f"-n {asked.iterations}: at least one iteration is needed.")
    if asked.warmup is not None and asked.warmup < 0:
        raise CaseError(f"-w {asked.warmup}: the number of warm-up calls cannot be negative.")
    check_budget(asked.budget_s)
    if asked.width is not None and not 0 < asked.width < 1:
        raise CaseError(
            f"--width {asked.width}: give the width of the interval relative to the median, like 0.05."
        )
    usual = Limits(budget_s=preset.budget_s)
    return Limits(
        budget_s=usual.budget_s if asked.budget_s is None else asked.budget_s,
        width=usual.width if asked.width is None else asked.width,
        warmup=usual.warmup if asked.warmup is None else asked.warmup,
        samples=asked.iterations,
    )


def check_budget(budget_s: float | None) -> None:
    """Raises CaseError if the budget is not a number of seconds above 0."""
    if budget_s is not None and not 0 < budget_s < MOST_BUDGET_S:
        raise CaseError(f"--budget {budget_s}: give seconds above 0, below {MOST_BUDGET_S:.0e}.")
