"""The fabric lane, in the ways of using a NIC's channels and memory that the all-to-all benchmark compares.

`single`: all peers through the first channel. `multi`: each peer's block split over all channels.
`round-robin`: the block for a peer through channel (peer + rank) mod channels. Without a suffix the memory is
plain host memory. `-pin`: pinned host memory. `-dma`: memory of a GPU, one a rank, which the NIC reads and
writes itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from unisono import launch, traits
from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.backends.unisono import bound
from unisono.bench.cases import CaseError
from unisono.records import Case

POLICIES = ("single", "multi", "round-robin")
WAYS = (*POLICIES, "single-pin", "multi-pin", *(f"{policy}-dma" for policy in POLICIES))


def _own_gpu() -> int:
    """Returns this rank's GPU. Ranks may share a GPU, since none of the lane's kernels waits for another."""
    import unisono

    return launch.from_env(os.environ).local_rank % unisono.device_count()


class FabricBackend(Backend):
    """A communicator of its own on the fabric lane, and registered memory of its own."""

    bit_exact = True
    own_memory = True
    asked_for = True
    variants = WAYS

    def __init__(self, way: str = "round-robin") -> None:
        if way not in WAYS:
            raise CaseError(f"the fabric has no way {way!r}: choose from {', '.join(WAYS)}.")
        self.name = f"fabric:{way}"
        self._policy = next(policy for policy in POLICIES if way.startswith(policy))
        self.memory = {"": "host", "-pin": "pinned", "-dma": "device"}[way.removeprefix(self._policy)]
        self._comm: Any = None

    def available(self, ranks: int) -> str | None:
        import unisono

        try:
            unisono.fabric_version()
        except unisono.ResourceError as error:
            return str(error)
        if self.memory == "host":
            return None
        if unisono.device_count() == 0:
            kind = "pinned host memory is CUDA's" if self.memory == "pinned" else "it moves GPU memory"
            return f"{kind}, and there is no GPU here (or no CUDA lane in this build)."
        return self._without_gpu_memory() if self.memory == "device" else None

    def _without_gpu_memory(self) -> str | None:
        import unisono
        from unisono.bench.cuda import device

        if why := device.missing():
            return why
        provider = unisono.fabric_provider()
        return None if provider.device_memory else f"provider {provider.name} takes no GPU memory here."

    def version(self) -> str:
        import unisono

        here, gpus = launch.from_env(os.environ).local_size, unisono.device_count()
        shared = f", {here} ranks on {gpus} GPUs" if self.memory == "device" and here > gpus else ""
        return f"libfabric {unisono.fabric_version()}, provider {unisono.fabric_provider().name}{shared}"

    def setup(self, ranks: Ranks) -> None:
        import unisono

        lane = unisono.Fabric(
            channels=1 if self._policy == "single" else None,
            policy=self._policy,
            pinned=self.memory == "pinned",
        )
        gpu = _own_gpu() if self.memory == "device" else None
        self._comm = unisono.Communicator(ranks, timeout_s=60.0, check=False, device=gpu, fabric=lane)

    def supports(self, case: Case) -> str | None:
        if self.memory != "host" and case.memory != "symmetric":
            return f"it is about {self.memory} memory of its own: measure symmetric memory."
        if self.memory == "device" and case.collective != "all_to_all":
            return f"the fabric lane has no {case.collective} of GPU memory."
        if case.memory == "symmetric" and not traits.collective(case.collective).stores_only:
            return f"{case.collective} has no program that writes to registered memory: measure plain memory."
        if case.memory == "symmetric" and case.placement == "in_place" and case.collective == "all_to_all":
            return "in place, a block could be overwritten before it has been sent."
        return None

    def allocate(self, size: int) -> tuple[Any, Any]:
        where = "cuda" if self.memory == "device" else "cpu"
        made = [self._comm.empty((size,), np.uint8, device=where) for _ in range(2)]
        if self.memory == "device":
            from unisono.bench.cuda.memory import TensorRegion, flat_bytes
            from unisono.bench.cuda.verify import arithmetic

            gpu = self._comm.device
            on_gpu = arithmetic(f"cuda:{gpu}")
            made = [TensorRegion(flat_bytes(one, gpu), arithmetic=on_gpu) for one in made]
        return made[0], made[1]

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        if case.collective == "barrier":
            return partial(self._comm.barrier)
        return bound(self._comm, case, buffers, {})

    def algorithm(self, case: Case) -> str | None:
        if case.collective == "barrier":
            return None
        return str(self._comm.plan(case.collective, case.bytes, case.memory == "symmetric"))

    def close(self) -> None:
        if self._comm is not None:
            self._comm.close()
            self._comm = None
