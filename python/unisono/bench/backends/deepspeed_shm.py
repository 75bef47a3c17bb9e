"""DeepSpeed's shared memory for CPUs, which it compiles at its first use with g++ and ninja.

A rank works with one thread. A wait has no deadline. A process can join one group.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

from unisono.bench.backends import named_memory
from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.backends.gloo import GlooBackend
from unisono.bench.provenance import lacks_avx512
from unisono.records import Case

DTYPES = frozenset({"f32", "bf16", "f16"})
MOST_BYTES = (1 << 31) - 1  # it counts bytes in an int


class DeepSpeedShmBackend(Backend):
    """deepspeed.inference_all_reduce_, the all_reduce of its inference."""

    name = "deepspeed-shm"
    asked_for = True

    def available(self, ranks: int) -> str | None:
        if not find_spec("torch"):
            return "torch is not installed: pip install torch."
        if not find_spec("deepspeed"):
            return "deepspeed is not installed: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed."
        if lacks_avx512():
            return "its shared memory needs AVX-512, which this processor lacks."
        return None

    def version(self) -> str:
        return f"deepspeed {version('deepspeed')}"

    def setup(self, ranks: Ranks) -> None:
        name = named_memory.new_name(ranks)  # first, so that all ranks are on one machine
        with _environment(DS_ACCELERATOR="cpu"):
            from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

            module = ShareMemCommBuilder().load(verbose=False)
        # One rank is one core, as for the other backends. Its OpenMP is not torch's.
        ctypes.CDLL(module.__file__).omp_set_num_threads(1)
        ranks.all_gather(b"")  # all have compiled it: `initialize` waits for the others without a deadline
        with _environment(LOCAL_SIZE=str(ranks.size), MASTER_ADDR=name, MASTER_PORT="0"):
            module.initialize(ranks.size, ranks.rank)
        named_memory.forget(ranks, name)

    def supports(self, case: Case) -> str | None:
        if case.collective != "all_reduce":
            return "DeepSpeed's shared memory has all_reduce only."
        if case.op != "sum" or case.dtype not in DTYPES:
            return "DeepSpeed's shared memory has sums of f32, bf16 and f16 only."
        if case.placement != "in_place":
            return "DeepSpeed's all_reduce works in place."
        return None if case.bytes <= MOST_BYTES else "DeepSpeed's all_reduce takes less than 2 GiB."

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        import torch

        reduce = torch.ops.deepspeed.inference_all_reduce_.default
        return partial(reduce, GlooBackend.tensor(buffers.out, case))


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets variables for the block: the records list the user's only."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
