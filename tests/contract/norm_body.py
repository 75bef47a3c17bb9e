"""The contract run of the fused norms on one rank: the matrix, the calls, and the comparison of every bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import unisono
from body import Report
from moe_reference import E4M3
from norm_reference import codes_and_scales, joined, normalised, scale_shape
from reference import DTYPES, Array, difference, specials

GROUPS = ("rows", "quants", "sharded", "aliases", "apart", "rounds")
FLOATS = ("f32", "f16", "bf16")
QUANTS = (None, "fp8", "fp8_token", "fp8_128", "mx")
ALGORITHMS = (None, "one_shot", "two_shot", "apart")
ROWS = (0, 1, 2, 3, 7, 64, 257)
HIDDENS = (8, 100, 128, 1, 1024, 1537, 4096, 7168)
_LARGEST = 1_800_000  # elements of x of all ranks, of 3 at least
_ROUNDS = 60


@dataclass(frozen=True)
class Job:
    """A call. number: seeds what else is chosen."""

    group: str
    number: int
    ranks: int
    rows: int
    hidden: int
    dtype: str = "bf16"
    kind: str = "rms"
    quant: str | None = None
    algorithm: str | None = None
    sharded: bool = False
    alias: str = ""  # the inputs that are outputs: x, residual, both, or crossed

    @property
    def biased(self) -> bool:
        return self.kind == "layer" and self.number % 3 != 0

    @property
    def eps(self) -> float:
        return (1e-6, 1e-5, 0.0, 1e-1)[self.number % 4]

    @property
    def scale(self) -> float | None:
        return (0.01, 1.0, 3e-3)[self.number % 3] if self.quant == "fp8" else None

    def held(self, rank: int) -> slice:
        """Returns the rows of a rank's residual."""
        if not self.sharded:
            return slice(0, self.rows)
        block = -(-self.rows // self.ranks)
        return slice(min(rank * block, self.rows), min((rank + 1) * block, self.rows))


def jobs(ranks: int, algorithms: Sequence[str | None]) -> Iterator[Job]:
    """Yields all jobs, in an order that every rank knows."""
    numbers = itertools.count()
    turns = {name: itertools.cycle(of) for name, of in
             {"dtype": FLOATS, "quant": QUANTS, "algorithm": algorithms, "kind": ("rms", "layer", "rms"),
              "rows": ROWS[1:-1], "hidden": HIDDENS}.items()}  # fmt: skip

    def job(group: str, **of: Any) -> Job:
        others = {name: next(turn) for name, turn in turns.items() if name not in of}
        return Job(group, next(numbers), ranks, **{**others, **of})

    for rows, hidden in itertools.product(ROWS, HIDDENS):
        if rows * hidden * max(ranks, 3) <= _LARGEST:
            yield job("rows", rows=rows, hidden=hidden)
    yield job("rows", rows=257, hidden=7168, dtype="bf16", quant=None, algorithm=None)
    yield job("rows", rows=3, hidden=40_001, dtype="f32")  # longer than a chunk
    for quant, dtype, algorithm in itertools.product(QUANTS, FLOATS, algorithms):
        for kind in ("rms", "layer") if ranks <= 3 else (next(turns["kind"]),):
            yield job("quants", quant=quant, dtype=dtype, kind=kind, algorithm=algorithm)
    of_shards = [one for one in algorithms if one != "one_shot"]
    for quant, dtype, algorithm in itertools.product(QUANTS, FLOATS, of_shards):
        yield job("sharded", quant=quant, dtype=dtype, algorithm=algorithm, sharded=True)
    for rows in ROWS:
        yield job("sharded", rows=rows, hidden=1537, algorithm=None, sharded=True)
    for alias, algorithm in itertools.product(("x", "residual", "both", "crossed"), algorithms):
        yield job("aliases", quant=None, alias=alias, algorithm=algorithm)
    for alias, algorithm in itertools.product(("x", "residual", "both"), of_shards):
        yield job("aliases", quant=None, alias=alias, algorithm=algorithm, sharded=True)
    for quant, algorithm in itertools.product(QUANTS, algorithms):
        yield job("apart", quant=quant, algorithm=algorithm)
    yield job("rounds", rows=64, hidden=1537, dtype="bf16", algorithm=None)
    yield job("rounds", rows=5, hidden=128, dtype="f32", algorithm=None, sharded=True, quant="mx")


@cache
def values(rows: int, hidden: int, dtype: str, which: int) -> Array:
    """Returns rows of data: of every scale, some with special values, some with zeros alone, some huge."""
    rng = np.random.default_rng([rows, hidden, which, list(DTYPES).index(dtype)])
    with np.errstate(all="ignore"):
        scale = np.exp2(rng.integers(-8, 6, (rows, 1)).astype(np.float32))
        made = (rng.standard_normal((rows, hidden), np.float32) * scale).astype(DTYPES[dtype])
        for row in range(2, rows, 5):
            places = rng.integers(hidden, size=3)
            made[row, places] = rng.choice(specials(dtype), 3)
        made[3::7] = 0
        made[5::11] *= np.float32(2.0**13).astype(made.dtype)
    made.flags.writeable = False
    return made


def parts(job: Job, turn: int) -> tuple[list[Array], Array, Array, Array | None]:
    """Returns x of every rank, the whole residual, the weight and the bias."""
    made = [values(job.rows, job.hidden, job.dtype, turn * 100 + r) for r in range(job.ranks)]
    residual = values(job.rows, job.hidden, job.dtype, turn * 100 + 50)
    weight, bias = (values(1, job.hidden, job.dtype, 1000 + which)[0] for which in (0, 1))
    return made, residual, weight, bias if job.biased else None


@cache
def expected(job: Job, turn: int) -> tuple[Array, Array]:
    """Returns residual_out and out of all rows, before they are quantised."""
    xs, residual, weight, bias = parts(job, turn)
    rows = joined(xs, residual)
    return rows, normalised(rows, weight, bias, job.eps, job.kind)


@dataclass
class Run:
    job: Job
    comm: unisono.Communicator
    report: Report

    def complain(self, text: str) -> None:
        self.report.complain(self.job.group, f"{self.job}: rank {self.comm.rank}, {text}")

    def compare(self, name: str, got: Any, wanted: Array) -> None:
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            self.complain(f"{name} is {got.dtype} {got.shape}, not {wanted.dtype} {wanted.shape}")
        elif wrong := difference(got, wanted):
            self.complain(f"{name}, {wrong}")

    def call(self, comm: unisono.Communicator, x: Array, residual: Array, turn: int, **options: Any) -> Any:
        """Calls with arrays of the caller, with new ones, or with more axes."""
        job = self.job
        _, _, weight, bias = parts(job, turn)
        if job.number % 2 and not options:
            kind = DTYPES[job.dtype] if job.quant is None else E4M3
            options = {"out": np.empty(x.shape, kind), "residual_out": np.empty_like(residual)}
            if job.quant in ("fp8_token", "fp8_128", "mx"):
                kind = np.dtype(np.uint8 if job.quant == "mx" else np.float32)
                options["scales_out"] = np.empty(scale_shape(x.shape, job.quant), kind)
        algorithm = job.algorithm if comm is self.comm else None
        sharded = "sharded" if job.sharded and comm is self.comm else "replicated"
        how = unisono.NormOptions(
            quant=job.quant, scale=job.scale, residual=sharded, algorithm=algorithm, **options
        )
        if job.kind == "rms":
            return comm.all_reduce_rms_norm(x, residual, weight, job.eps, options=how)
        return comm.all_reduce_layer_norm(x, residual, weight, bias, job.eps, options=how)

    def once(self, turn: int = 0) -> None:
        job, rank = self.job, self.comm.rank
        xs, whole, *_ = parts(job, turn)
        x, residual = xs[rank].copy(), whole[job.held(rank)].copy()
        outputs = {
            "x": (x, None),
            "residual": (None, residual),
            "both": (x, residual),
            "crossed": (residual, x),
        }
        options = {}
        if job.alias:
            options = dict(zip(("out", "residual_out"), outputs[job.alias], strict=True))
        deep = job.number % 5 == 4 and not job.sharded and not job.alias
        shape = (1, *x.shape) if deep else x.shape
        held = residual.shape if job.sharded else shape
        first, residual_out = self.call(self.comm, x.reshape(shape), residual.reshape(held), turn, **options)
        rows, out = expected(job, turn)
        self.check(first, out.reshape(shape), turn)
        self.compare("residual_out", residual_out, rows[job.held(rank)].reshape(held))
        if not job.alias and (difference(x, xs[rank]) or difference(residual, whole[job.held(rank)])):
            self.complain("the call has changed its input")

    def check(self, first: Any, out: Array, turn: int) -> None:
        job = self.job
        if job.quant is None:
            return self.compare("out", first, out)
        codes, scales = codes_and_scales(out.reshape(job.rows, job.hidden), job.quant, job.scale)
        self.compare("codes", first[0], codes.reshape(out.shape))
        if scales is not None:
            self.compare("scales", first[1], scales.reshape(scale_shape(out.shape, job.quant)))
        elif first[1] != job.scale:
            self.complain(f"the scale is {first[1]}, not {job.scale}")
        return None

    def apart(self) -> None:
        """Compares with an all_reduce, then the rest by a communicator of one rank."""
        job = self.job
        xs, residual, *_ = parts(job, 0)
        fused = self.call(self.comm, xs[self.comm.rank], residual, 0)
        summed = self.comm.all_reduce(xs[self.comm.rank])
        with unisono.init_threads(1)[0] as alone:
            later = self.call(alone, summed, residual, 0)
        for one, other in zip(_flat(fused), _flat(later), strict=True):
            if isinstance(one, np.ndarray):
                self.compare("the calls apart", one, other)

    def rounds(self) -> None:
        for turn in range(_ROUNDS):
            self.once(turn % 3)


def _flat(results: Any) -> list[Any]:
    return [part for one in results for part in (one if isinstance(one, tuple) else (one,))]


def _algorithms(comm: unisono.Communicator) -> tuple[str | None, ...]:
    """Returns those that the ranks have: between machines there is one."""
    one = np.ones((1, 1), np.float32)
    try:
        comm.all_reduce_rms_norm(one, one, one[0], options=unisono.NormOptions(algorithm="one_shot"))
    except unisono.UsageError:
        return (None, "apart")
    return ALGORITHMS


def run(communicators: Sequence[unisono.Communicator], report: Report) -> None:
    """Runs all jobs on this rank, by turns on its communicators, in the same order as every other rank."""
    algorithms = _algorithms(communicators[0])
    for job in jobs(communicators[0].size, algorithms):
        here = communicators[job.number % len(communicators)]
        one = Run(job, here, report)
        try:
            {"apart": one.apart, "rounds": one.rounds}.get(job.group, one.once)()
        except Exception as error:
            raise RuntimeError(f"{job} on rank {here.rank}: {type(error).__name__}: {error}") from error
        report.done[job.group] += 1
