"""Ranks on GPUs: one process, one thread, as many communicators as a test asks for.

If there are fewer GPUs than ranks, UNISONO_SHARE_DEVICE=1 lets the ranks share one. The protocol is the same,
the speed is not. Otherwise the test is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import unisono

pytest.importorskip("torch")
pytest.importorskip("ml_dtypes", reason="the oracle needs ml_dtypes: put its wheel into .whl")
from reference import DTYPES

Array = npt.NDArray[Any]
if os.environ.get("UNISONO_SHARE_DEVICE") == "1":
    # otherwise streams of different ranks wait for each other in one queue
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def devices_for(n: int) -> tuple[list[int], int]:
    """Returns the device of each rank, and the most SMs of each. Skips the test if there are too few GPUs."""
    here = unisono.device_count()
    if here >= n:
        return list(range(n)), 0
    if here and os.environ.get("UNISONO_SHARE_DEVICE") == "1":
        return [0] * n, 128 // n  # the kernels of all ranks must be resident at once
    pytest.skip(f"needs {n} GPUs: this machine has {here}")


class Gpus:
    """`n` ranks, with a stream for each."""

    def __init__(self, n: int, **options: Any) -> None:
        import torch

        self.devices, max_sms = devices_for(n)
        self.n = n
        self.comms = unisono.init_all(
            self.devices, max_sms=options.pop("max_sms", max_sms), check=False, **options
        )
        self.reach = n > 1 and self.comms[0].peer_access  # direct programs run
        self.nvlink = n > 1 and self.comms[0].nvlink  # lines of 128 bytes run
        # torch has 32 streams of each priority, and gives them in turn
        self.streams = [
            torch.cuda.Stream(device, priority=-(r // 32)) for r, device in enumerate(self.devices)
        ]

    def put(self, host: Array, rank: int) -> Any:
        """Returns a tensor with these bits on the rank's GPU."""
        import torch

        return self.view(
            torch.from_numpy(np.ascontiguousarray(host).view(np.uint8).reshape(-1)).to(self.devices[rank]),
            host,
        )

    @staticmethod
    def view(raw: Any, like: Array) -> Any:
        import torch

        names = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
        kind = names.get(like.dtype.name) or getattr(torch, like.dtype.name)
        return raw.view(kind).view(like.shape)

    def run(self, call: Callable[[Any, int, Any], Any]) -> list[Any]:
        """Makes `call(communicator, rank, stream)` for every rank, from this one thread. Waits for all."""
        import torch

        for device in set(self.devices):
            torch.cuda.synchronize(device)
        results = [call(comm, rank, self.streams[rank]) for rank, comm in enumerate(self.comms)]
        for comm, stream in zip(self.comms, self.streams, strict=True):
            comm.synchronize(stream)
        return results

    def capture(self, call: Callable[[Any, int], object], streams: list[Any] | None = None) -> list[Any]:
        """Returns a graph of each rank's calls, captured on its own stream, or on its stream of `streams`."""
        import torch

        graphs = []
        for r, (comm, stream) in enumerate(zip(self.comms, streams or self.streams, strict=True)):
            graphs.append(torch.cuda.CUDAGraph())
            with (
                torch.cuda.device(self.devices[r]),
                torch.cuda.graph(graphs[r], stream=stream, capture_error_mode="thread_local"),
            ):
                call(comm, r)
        return graphs

    def replay(self, graphs: list[Any], xs: list[Any], fresh: list[Array]) -> None:
        """Fills the inputs, replays every rank's graph on its stream, and waits."""
        import torch

        for r, x in enumerate(xs):
            x.copy_(self.put(fresh[r], r))
            torch.cuda.synchronize(self.devices[r])
        for r, graph in enumerate(graphs):
            with torch.cuda.device(self.devices[r]), torch.cuda.stream(self.streams[r]):
                graph.replay()
        for comm, stream in zip(self.comms, self.streams, strict=True):
            comm.synchronize(stream)

    def close(self) -> None:
        for comm in self.comms:
            comm.close()


@contextmanager
def gpus(n: int, **options: Any) -> Iterator[Gpus]:
    ranks = Gpus(n, **options)
    try:
        yield ranks
    finally:
        ranks.close()


def numbers(tensor: Any, dtype: str) -> Array:
    """Returns a tensor's bits as a numpy array of that dtype."""
    import torch

    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return raw.view(DTYPES[dtype]).reshape(tuple(tensor.shape))


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Returns any bit patterns: infinities, denormals, -0.0 and NaN among the numbers."""
    kind = DTYPES[dtype]
    size = int(np.prod(shape)) * kind.itemsize
    return rng.integers(0, 256, size, np.uint8).view(kind).reshape(shape)


def compiled(source: Path, to: Path) -> Path:
    """Returns the program that nvcc makes of a source and the installed package, as a user would."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc here")
    package = Path(unisono.__file__).resolve().parent
    program, lib = to / source.stem, package / "lib"
    options = ["-std=c++20", "-arch=native", f"-I{package / 'include'}", f"-L{lib}", f"-Xlinker=-rpath,{lib}"]
    subprocess.run([nvcc, *options, str(source), "-lunisono", "-o", str(program)], check=True, timeout=300)
    return program
