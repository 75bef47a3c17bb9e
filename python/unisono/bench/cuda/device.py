"""One rank's GPU in a run of the bench: stream, clock, memory, and waits, each with a deadline."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from unisono.bench.backends.base import Backend
from unisono.bench.binding import parse_cpulist
from unisono.bench.buffers import Pools
from unisono.bench.cases import CaseError, calls_per_sample
from unisono.bench.control import Control
from unisono.bench.cuda import verify
from unisono.bench.cuda.memory import TensorRegion, device_region, flat_bytes
from unisono.bench.cuda.runtime import CudaError, Driver, Runtime
from unisono.bench.cuda.start import StartLine
from unisono.bench.cuda.timing import CudaRunner
from unisono.bench.device import Device, HangError, Runner, nothing
from unisono.bench.timing import Call
from unisono.bench.watch import Watch
from unisono.records import Case, Ceiling, Link

HANG_S = 20.0
LIBRARY_S = 15.0  # the communicator's own deadline; shorter, so that the user sees its error
RECOVER_S = 20.0
HOLD_S = 60.0  # the deadline of a start line
SILENCE_S = 240.0  # the longest time without progress, in a library's start, a call or a close
MEMORY_SHARE = 0.8  # of the free memory of the fullest GPU; the rest is for the libraries' staging
STATE = "name,clocks.sm,clocks.mem,temperature.gpu,power.draw"
# Turns multicast through the switch (NVLS) off for all libraries, unless the user sets these.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # NCCL connects at its start. In a run it would wait for a GPU that waits for the start of a sample.
    "NCCL_RUNTIME_CONNECT": "0",
    # NCCL 2.28's graphs over the bench's buffers sometimes never end if registered (results/README.md).
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_DEBUG": "WARN",
}


def prepare_environment(env: MutableMapping[str, str]) -> None:
    """Sets ENVIRONMENT, except the user's variables. Must come before any library that communicates loads."""
    for name, value in ENVIRONMENT.items():
        env.setdefault(name, value)


def missing() -> str | None:
    """Returns why this machine cannot run --device cuda, or None."""
    if find_spec("torch") is None:
        return "on GPUs the bench needs torch, whose CUDA tensors are its buffers: pip install torch."
    import torch

    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU here: one for each rank is needed, and a torch built for CUDA."
    return None


def count() -> int:
    """Returns how many GPUs this process sees."""
    import torch

    return int(torch.cuda.device_count())


def near_gpus(devices: int, root: Path = Path("/sys/bus/pci/devices")) -> list[frozenset[int]]:
    """Returns the CPUs that are close to each of the first GPUs, by their PCI buses; empty if a bus does not
    say. Starts no context on the GPUs."""
    try:
        driver = Driver()
        lists = [(root / driver.pci_address(index) / "local_cpulist").read_text() for index in range(devices)]
    except (OSError, CudaError):
        return []
    return [parse_cpulist(text) for text in lists]


class CudaDevice(Device):
    """GPU `index` of this machine. Sets torch's current device and stream for the calling thread, and turns
    multicast off. Raises CaseError if there is no such GPU."""

    kind = "cuda"

    def __init__(self, index: int, control: Control, align: Callable[[], object]) -> None:
        prepare_environment(os.environ)
        why = missing()
        if why is None and index >= count():
            why = (
                f"rank {control.rank} needs GPU {index}, and this process sees {count()}: start fewer ranks."
            )
        failed = control.first_error(why)
        if failed is not None:
            raise CaseError(failed[1])
        import torch

        torch.cuda.set_device(index)
        self._torch_stream = torch.cuda.Stream(index)
        torch.cuda.set_stream(self._torch_stream)
        self.index, self.stream, self.align = index, int(self._torch_stream.cuda_stream), align
        self.sm_count = int(torch.cuda.get_device_properties(index).multi_processor_count)
        self.runtime = Runtime(torch.version.cuda)
        self.line = StartLine(control, align, self.runtime, self.stream, HOLD_S)
        self.arithmetic = verify.arithmetic(f"cuda:{index}")
        self._rank, self._size, self._control = control.rank, control.size, control
        self.watch = Watch(control.rank, SILENCE_S)
        self._ceiling: float | None = None

    # ---- time

    def wait(self, step: str) -> None:
        deadline = monotonic() + HANG_S
        query = self._torch_stream.query
        while not query():
            if monotonic() > deadline:
                raise HangError(
                    f"{self.watch.doing}: rank {self._rank}'s GPU was not done with {step} after "
                    f"{HANG_S:.0f} s."
                )
        self.watch.beat()

    def agree(self, error: str | None) -> None:
        failed = self._control.first_error(error)
        if failed is not None:
            raise RuntimeError(f"rank {failed[0]}: {failed[1]}")

    def new_event(self) -> Any:
        import torch

        return torch.cuda.Event(enable_timing=True)

    def elapsed_ns(self, first: Any, last: Any) -> float:
        return 1e6 * float(first.elapsed_time(last))

    def runner(self, case: Case, call: Call, backend: Backend, before: Call = nothing) -> Runner:
        return CudaRunner(self, case.mode, call, calls_per_sample(case), backend.raise_if_failed)

    def finish(self, backend: Backend) -> None:
        self.wait("the call that is checked")
        backend.raise_if_failed()

    def recover(self, backend: Backend) -> bool:
        """Has the backend end its kernels. Returns whether they end in time."""
        import torch

        def abort() -> None:
            torch.cuda.set_device(self.index)
            backend.abort()

        aborting = threading.Thread(target=abort, daemon=True)  # the backend may wait for the GPU
        aborting.start()
        aborting.join(RECOVER_S)
        try:
            self.wait("ending a hung call")
        except Exception:
            return False
        return not aborting.is_alive()

    # ---- memory

    def pools(self, cases: Iterable[Case], rank: int) -> Pools:
        index = self.index or 0
        plain = partial(device_region, device=index)
        return Pools(cases, rank, plain, lambda array: TensorRegion(flat_bytes(array, index)))

    def room(self, control: Control, own: int) -> int:
        import torch

        free = min(control.gather(int(torch.cuda.mem_get_info(self.index)[0]), int))
        return int(free * MEMORY_SHARE) // (4 + 2 * own)

    def used_bytes(self) -> tuple[int, int]:
        import torch

        free, total = torch.cuda.mem_get_info(self.index)
        return int(total - free), int(total)

    def give_back(self) -> None:
        import torch

        self.wait("giving memory back")
        torch.cuda.empty_cache()

    # ---- the machine

    def ceilings(self, control: Control) -> tuple[float | None, list[Ceiling | Link]]:
        """See `Device.ceilings`. Of one GPU it is how fast that copies. Several are measured once, by a
        process that rank 0 starts, while all ranks wait. None: the process does not see all GPUs."""
        from unisono.bench.cuda import links

        if self._ceiling is not None:
            return self._ceiling or None, []
        found: list[Ceiling | Link] = []
        if self._size == 1:
            found = [self._copy(links.BYTES, links.SAMPLES)]
        elif control.rank == 0 and self._size <= count():
            found = links.elsewhere(self._size)
        ceiling = [record.gbps for record in found if isinstance(record, Ceiling)]
        best = control.from_root(lambda: max(ceiling, default=0.0), float)
        self._ceiling = best
        return best or None, found

    def _copy(self, size: int, samples: int) -> Ceiling:
        """Measures `copy`: bytes copied within the GPU's memory over time."""
        import torch

        source, target = torch.ones(2, size, dtype=torch.uint8, device=f"cuda:{self.index}")
        timed = CudaRunner(self, "events", lambda: target.copy_(source), 1, lambda: None).timed(samples, 1, 2)
        if timed.error is not None:
            raise HangError(timed.error)
        found = [size / ns for ns in timed.durations.tolist()]
        return Ceiling(name="copy", bytes=size, gbps=statistics.median(found), samples_gbps=found)

    def gpus(self) -> list[str]:
        import torch

        return [torch.cuda.get_device_name(index) for index in range(min(self._size, count()))]

    def state(self) -> list[str]:
        return gpu_state()

    def close(self) -> None:
        super().close()
        self.line.close()


def gpu_state() -> list[str]:
    """Returns clocks, temperature, power and reasons for throttling of each GPU, by nvidia-smi; empty if it
    fails."""
    # the new and the old name of the field
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        query = [f"--query-gpu={STATE},{reasons}", "--format=csv,noheader"]
        try:
            done = subprocess.run(
                ["nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        if done.returncode == 0:
            return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []
