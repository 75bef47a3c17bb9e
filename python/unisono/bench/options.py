"""The options of a run, and the presets. Rank 0's options hold for all ranks."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import msgspec

from unisono.bench import cases, pairs
from unisono.bench.cases import size_range
from unisono.bench.matmul import Grid as MatmulGrid
from unisono.bench.moe import Grid
from unisono.bench.norm import Grid as NormGrid
from unisono.bench.pairs import ALL
from unisono.bench.schedule import Limits
from unisono.records import Case
from unisono.records.vocabulary import MATMUL, MATMULS, MOES, NORM, OWN, PATTERNS, PINGPONG

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Preset:
    """Options under a name. `budget_s`: seconds for checks and measurements together."""

    sizes: tuple[int, ...]
    budget_s: float
    dtypes: tuple[str, ...] = ("f32",)
    ops: tuple[str, ...] = ("sum",)
    placements: tuple[str, ...] = ("out_of_place",)
    memories: tuple[str, ...] = ("plain",)
    workloads: tuple[str, ...] = ()
    about: str = ""


PRESETS = {
    "quick": Preset(
        sizes=(8, KIB, 64 * KIB, MIB, 16 * MIB),
        budget_s=60.0,
        workloads=("llama-3-70b-tp-decode",),
        about="under 2 minutes on 2 cores: five sizes, plain memory, one real model",
    ),
    "standard": Preset(
        sizes=(*size_range(8, 256 * MIB, 8),),
        budget_s=390.0,
        memories=("plain", "symmetric"),
        workloads=("llama-3-70b-tp-decode", "ddp-resnet-50"),
        about="under 9 minutes on 2 cores: 8 B to 128 MiB, plain and symmetric memory, two real models",
    ),
    "extensive": Preset(
        sizes=(*size_range(8, 256 * MIB, 4), 256 * MIB),
        budget_s=3600.0,
        dtypes=("f32", "bf16"),
        placements=("out_of_place", "in_place"),
        memories=("plain", "symmetric"),
        workloads=("all",),
        about="about an hour: steps of 4 up to 256 MiB, f32 and bf16, in and out of place, all models",
    ),
}


CUDA_PRESETS = {
    "quick": Preset(
        sizes=(4 * KIB, 256 * KIB, 16 * MIB, 256 * MIB),
        budget_s=90.0,
        dtypes=("bf16",),
        memories=("symmetric",),
    ),
    "standard": Preset(
        sizes=(*size_range(KIB, 1 << 30, 4),),
        budget_s=420.0,
        dtypes=("bf16",),
        memories=("plain", "symmetric"),
    ),
    "extensive": Preset(
        sizes=(*size_range(KIB, 4 << 30, 4),),
        budget_s=3600.0,
        dtypes=("bf16", "f32"),
        placements=("out_of_place", "in_place"),
        memories=("plain", "symmetric"),
        workloads=("all",),
    ),
}
CUDA_DEFAULT_MODES = ("graph", "events")

# `--fabric` takes the sizes and the memory of the rows in Libefaxx's table.
FABRIC_PRESET = Preset(sizes=(*size_range(4 * MIB, 128 * MIB, 2),), budget_s=120.0, memories=("symmetric",))
FABRIC_RANKS = 4


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `unisono bench` or `unisono tune`."""

    directory: str
    command: list[str]
    preset: str | None
    backends: list[str]
    sizes: list[int]
    dtypes: list[str]
    ops: list[str]
    placements: list[str]
    memories: list[str]
    workloads: list[str]  # names in workloads.toml
    limits: Limits
    seed: int
    collectives: list[str]
    modes: list[str]
    cores: int  # the cores that the run may use; a rank itself may be bound to one of them
    device: str = "cpu"
    offsets: tuple[int, ...] = (0,)  # of the collectives' buffers from the start of a page, in bytes
    inputs: tuple[str, ...] = ("kept",)  # of the collectives, see vocabulary.INPUTS
    fabric: bool = False  # over the provider of libfabric in the environment
    threads: int = 0  # the number of ranks that are threads of one process; 0: ranks are processes
    to_memory_limit: bool = False  # in place of the grid, see `limit`
    patterns: tuple[str, ...] = PATTERNS  # of a pingpong
    pairs: str = ALL  # as `pairs.select` takes it
    streams: tuple[str, ...] = (OWN,)  # of an all_to_all
    moe: Grid = Grid()  # of the cases of a mixture of experts among `collectives`
    norm: NormGrid = NormGrid()  # of all_reduce_rms_norm, if among `collectives`
    matmul: MatmulGrid = MatmulGrid()  # of the matmuls among `collectives`
    scaling: tuple[str, ...] = ()  # weak, strong: `sizes` as in `unisono scaling`
    room_bytes: int = 0  # the least size of the buffers
    mpis: tuple[str, ...] = ()  # under which the ranks are started in turn; empty: as `start` chooses
    launches: int = 1  # of the ranks, with `mpis` under each
    launch: int = 1  # the number of this one
    check: bool = True
    terminal_columns: int | None = None  # of the user's terminal; None: progress as plain lines

    def grid(self, ranks: int) -> list[Case]:
        """Returns every distinct case of the options on `ranks` ranks."""
        fused = self.norm.cases(ranks) if NORM in self.collectives else []
        if not {*MATMULS, MATMUL}.isdisjoint(self.collectives):
            fused += self.matmul.cases(ranks, self.collectives)
        others = cases.grid(
            ranks,
            [name for name in self.collectives if name not in cases.SHAPED],
            self.sizes,
            self.dtypes,
            self.ops,
            self.placements,
            self.memories,
            self.modes,
            self.device,
            self.offsets,
            self.inputs,
        )
        return list(dict.fromkeys(self.moe.cases(ranks, self.collectives) + fused + others))

    def check_ranks(self, ranks: int) -> None:
        """Raises CaseError if the options cannot be run on `ranks` ranks."""
        why = pairs.problem(self.pairs, ranks) if PINGPONG in self.collectives else None
        if not set(MOES).isdisjoint(self.collectives):
            why = why or self.moe.problem(ranks)
        if self.fabric and ranks < 2:
            why = "--fabric measures what passes between ranks: give --ranks 2 or more."
        if why is not None:
            raise cases.CaseError(why)

    def pack(self) -> str:
        """Returns the options as one word of a command line."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @staticmethod
    def unpack(word: str) -> Options:
        return msgspec.json.decode(base64.urlsafe_b64decode(word), type=Options)
