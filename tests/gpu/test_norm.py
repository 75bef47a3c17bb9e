"""The fused norms on GPUs give the bits of plain numpy (norm_reference.py), as those on CPUs do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import unisono
from gpus import Gpus, gpus, numbers
from norm_body import FLOATS, QUANTS, Job, expected, jobs, parts
from norm_reference import codes_and_scales, scale_shape
from reference import Array, combine, difference

pytestmark = pytest.mark.gpu
SEVERAL = [1, 2, 3, 4, 5, 8]
ALGORITHMS = (None, "one_shot", "two_shot", "one_shot_ll128", "two_shot_ll128", "apart")


class Arrays:
    """A rank's tensors of a job."""

    def __init__(self, ranks: Gpus, job: Job, rank: int) -> None:
        xs, residual, weight, bias = parts(job, 0)
        put = lambda array: ranks.put(array.copy(), rank)  # noqa: E731
        self.x, self.residual, self.weight = put(xs[rank]), put(residual), put(weight)
        self.bias = None if bias is None else put(bias)

    def call(self, job: Job, comm: unisono.Communicator, stream: Any = None, **options: Any) -> Any:
        outputs = {
            "": {},
            "x": {"out": self.x},
            "residual": {"residual_out": self.residual},
            "both": {"out": self.x, "residual_out": self.residual},
            "crossed": {"out": self.residual, "residual_out": self.x},
        }
        options = {"algorithm": job.algorithm, **outputs[job.alias], **options}
        how = unisono.NormOptions(quant=job.quant, scale=job.scale, **options)
        if job.kind == "rms":
            return comm.all_reduce_rms_norm(
                self.x, self.residual, self.weight, job.eps, options=how, stream=stream
            )
        return comm.all_reduce_layer_norm(
            self.x, self.residual, self.weight, self.bias, job.eps, options=how, stream=stream
        )


def check(job: Job, result: Any) -> None:
    first, residual_out = result
    rows, out = expected(job, 0)
    compare(job, "residual_out", residual_out, rows, job.dtype)
    if job.quant is None:
        return compare(job, "out", first, out, job.dtype)
    codes, scales = codes_and_scales(out, job.quant, job.scale)
    compare(job, "codes", first[0], codes, "f8e4m3")
    if scales is not None:
        assert tuple(first[1].shape) == scale_shape(out.shape, job.quant)
        compare(job, "scales", first[1], scales, "u8" if job.quant == "mx" else "f32")
    return None


def compare(job: Job, name: str, got: Any, wanted: Array, dtype: str) -> None:
    wrong = difference(numbers(got, dtype), wanted)
    assert wrong is None, f"{job}, {name}: {wrong}"


def moved(array: Any) -> Any:
    """Returns a copy that begins an element behind a word's begin."""
    copy = array.new_empty(array.numel() + 1)[1:].view(array.shape)
    return copy.copy_(array)


def play(ranks: Gpus, job: Job, moves: int | None = None) -> None:
    """moves: the rank whose arrays begin between words."""
    arrays = [Arrays(ranks, job, rank) for rank in range(ranks.n)]
    if moves is not None:
        arrays[moves].x, arrays[moves].residual = moved(arrays[moves].x), moved(arrays[moves].residual)
    for result in ranks.run(lambda comm, rank, stream: arrays[rank].call(job, comm, stream)):
        check(job, result)


@pytest.mark.parametrize("n", SEVERAL)
def test_bits_are_those_of_numpy(n: int) -> None:
    with gpus(n) as ranks:
        for job in jobs(n, ALGORITHMS):
            if not job.sharded and job.group not in ("apart", "rounds"):
                play(ranks, job)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_and_long_rows(algorithm: str | None) -> None:
    with gpus(2) as ranks:
        for rows, hidden, quant in (
            (4096, 512, "fp8_token"),
            (1000, 1003, None),
            (5, 16384, "mx"),
            (1, 30001, None),
        ):
            play(ranks, Job("large", 1, 2, rows, hidden, quant=quant, algorithm=algorithm))


def test_rows_that_a_block_holds_in_registers() -> None:
    """The lengths of one rank's rows are around those of the kernels, and end within a block of 128."""
    with gpus(1) as ranks:
        lengths = (2048, 2056, 4096, 4104, 5000, 7168, 7176, 8192, 8200)
        for number, (quant, dtype, hidden) in enumerate(itertools.product(QUANTS, FLOATS, lengths)):
            play(ranks, Job("short", number, 1, (1, 8, 13, 3)[number % 4], hidden, dtype, quant=quant))


@pytest.mark.parametrize("algorithm", ["one_shot", "one_shot_ll128"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_sums_that_blocks_hold_in_registers(n: int, algorithm: str) -> None:
    """Clusters of 8 to 1 blocks, on GPUs of their own and on one; more rows than clusters. Of 7504 elements
    one block has two messages of lines, the other one."""
    with gpus(n) as ranks:
        rows, lengths = (1, 5, 11, 14, 21, 30, 60), (2056, 5000, 7168, 7504, 8192)
        for number, (count, hidden) in enumerate(itertools.product(rows, lengths)):
            quant, dtype = QUANTS[(number + number // 5) % 5], ("bf16", "f16", "bf16", "f32")[number % 4]
            play(ranks, Job("sums", number, n, count, hidden, dtype, quant=quant, algorithm=algorithm))
        for number, alias in enumerate(("x", "residual", "both", "crossed")):
            for count in (1, 14, 30):
                play(ranks, Job("sums", number, n, count, 7168, algorithm=algorithm, alias=alias))
        play(ranks, Job("sums", 0, n, 5, 7168, kind="layer", algorithm=algorithm))


def test_more_blocks_than_rows() -> None:
    """A row has a cluster of blocks if this rank has them."""
    with gpus(2) as ranks:
        for rows, hidden in itertools.product((1, 3, 8, 9, 32), (1024, 7168, 8000)):
            play(ranks, Job("clusters", rows, 2, rows, hidden, quant=QUANTS[rows % 5], algorithm="one_shot"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_arrays_of_a_rank_that_begin_between_words(algorithm: str | None) -> None:
    """Ranks cut rows alike, wherever their arrays lie."""
    with gpus(3) as ranks:
        cases = itertools.product((1, 5, 14, 40), (1024, 7168, 1000, 7504))
        for (rows, hidden), quant in zip(cases, itertools.cycle(QUANTS), strict=False):
            play(ranks, Job("places", rows, 3, rows, hidden, quant=quant, algorithm=algorithm), moves=1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n", [2, 3])
def test_graphs(n: int, algorithm: str | None) -> None:
    job = Job("graphs", 2, n, 16, 4096, quant="fp8_128" if n == 2 else None, algorithm=algorithm)
    with gpus(n) as ranks:
        arrays = [Arrays(ranks, job, rank) for rank in range(n)]
        results: list[Any] = [None] * n

        def call(comm: unisono.Communicator, rank: int) -> None:
            results[rank] = arrays[rank].call(job, comm)

        ranks.run(lambda comm, rank, stream: arrays[rank].call(job, comm, stream))
        graphs = ranks.capture(call)
        xs = [one.x for one in arrays]
        for _ in range(20):
            ranks.replay(graphs, xs, [x.copy() for x in parts(job, 0)[0]])
            for result in results:
                check(job, result)


@pytest.mark.parametrize(
    ("options", "words"), [({"residual": "sharded"}, "a sharded residual is for arrays on CPUs")]
)
def test_calls_that_are_for_cpus(options: dict[str, Any], words: str) -> None:
    job = Job("refused", 0, 1, 4, 64)
    with gpus(1) as ranks:
        arrays = Arrays(ranks, job, 0)
        with pytest.raises(unisono.UsageError, match=words):
            arrays.call(job, ranks.comms[0], **options)
        with pytest.raises(unisono.UsageError, match="residual is not where x is"):
            ranks.comms[0].all_reduce_rms_norm(arrays.x, arrays.residual.cpu(), arrays.weight)


def test_quantised_apart_needs_another_residual_out() -> None:
    job = Job("refused", 0, 2, 4, 64, quant="mx", alias="residual")
    with gpus(2) as ranks:
        arrays = Arrays(ranks, job, 0)
        with pytest.raises(unisono.UsageError, match="give it memory of its own"):
            arrays.call(job, ranks.comms[0], algorithm="apart")
        play(ranks, job)


def test_quantised_rows_are_summed_where_there_is_a_place() -> None:
    """In place in one kernel, which the plan would leave to the calls apart."""
    with gpus(2) as ranks:
        for number, (rows, dtype) in enumerate(itertools.product((150, 300), ("bf16", "f32"))):
            for alias in ("", "residual"):
                play(ranks, Job("many", number, 2, rows, 4096, dtype, quant="fp8_128", alias=alias))


def test_a_rank_that_stays_away() -> None:
    job = Job("late", 0, 2, 4, 4096)
    with gpus(2, timeout_s=1.0) as ranks:
        arrays = Arrays(ranks, job, 0)
        arrays.call(job, ranks.comms[0], ranks.streams[0])
        with pytest.raises(unisono.TimeoutError, match=r"all_reduce_rms_norm .* rank 1"):
            ranks.comms[0].synchronize(ranks.streams[0])


def test_other_calls_before_and_after() -> None:
    """The kernels share the rings of the exchanges."""
    with gpus(3) as ranks:
        for turn, algorithm in enumerate(ALGORITHMS * 4):
            job = Job("mixed", turn, 3, (1, 40, 7)[turn % 3], 2048, algorithm=algorithm)
            arrays = [Arrays(ranks, job, rank) for rank in range(3)]

            def both(comm: unisono.Communicator, rank: int, stream: Any) -> Any:
                name = ("one_shot_packets", "two_shot_ll128", "two_shot_packets", None)[turn % 4]  # noqa: B023
                sums = comm.all_reduce(arrays[rank].x, algorithm=name, stream=stream)  # noqa: B023
                return arrays[rank].call(job, comm, stream), sums  # noqa: B023

            for result, sums in ranks.run(both):
                check(job, result)
                wanted = combine(parts(job, 0)[0], "sum")
                assert difference(numbers(sums, job.dtype), wanted) is None
