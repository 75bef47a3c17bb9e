"""Tests GPU arrays of other libraries: cupy's, and objects with only DLPack or __cuda_array_interface__."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ranks as processes
import unisono
from gpus import Gpus, gpus

pytestmark = pytest.mark.gpu
KINDS = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Gpus]:
    with gpus(2) as made:
        yield made


def blocks(kind: str, n: int = 2, count: int = 1001) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 50, (n, count)).astype(kind) for _ in range(n)]


class Dlpack:
    """A tensor that offers only DLPack."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class Interface:
    """A tensor that offers only the CUDA array interface, with some entries replaced."""

    def __init__(self, tensor: Any, **other: Any) -> None:
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, **other}


@pytest.mark.parametrize("kind", KINDS)
def test_cupy(ranks: Gpus, kind: str) -> None:
    cupy = pytest.importorskip("cupy")
    xs = blocks(kind)
    inputs, outs = [], []
    for r in range(2):
        with cupy.cuda.Device(ranks.devices[r]):
            inputs.append(cupy.asarray(xs[r]))
            outs.append([cupy.zeros((2, *xs[r].shape), kind), cupy.zeros(xs[r].shape[1:], kind), inputs[r]])

    def call(comm: Any, r: int, stream: Any) -> list[Any]:
        x, (gathered, scattered, total) = inputs[r], outs[r]
        return [
            comm.all_gather(x, out=gathered, stream=stream),
            comm.reduce_scatter(x, out=scattered, stream=stream),
            comm.all_reduce(x, out=total, stream=stream),
        ]

    for r, results in enumerate(ranks.run(call)):
        assert all(one is out for one, out in zip(results, outs[r], strict=True))
        assert np.array_equal(results[0].get(), np.stack(xs))
        assert np.array_equal(results[1].get(), (xs[0] + xs[1])[r])
        assert np.array_equal(results[2].get(), xs[0] + xs[1])


def test_new_outputs_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    with gpus(1) as one:
        x = cupy.asarray(blocks("float32")[0])
        for result, shape in (
            (one.comms[0].all_reduce(x), x.shape),
            (one.comms[0].all_gather(x), (1, *x.shape)),
        ):
            one.comms[0].synchronize(cupy.cuda.get_current_stream())
            assert isinstance(result, cupy.ndarray)
            assert np.array_equal(result.get(), x.get().reshape(shape))


def test_current_stream_of_cupy(ranks: Gpus) -> None:
    """A call without stream= follows the work on cupy's current stream."""
    cupy = pytest.importorskip("cupy")
    arrays, streams = [], []
    for device in ranks.devices:
        with cupy.cuda.Device(device):
            arrays.append(cupy.zeros(1 << 20, cupy.float32))
            cupy.add(arrays[-1], 0, out=arrays[-1])  # loads the kernel before a GPU waits for another
            streams.append(cupy.cuda.Stream(non_blocking=True))
            cupy.cuda.get_current_stream().synchronize()
    for comm, device, x, stream in zip(ranks.comms, ranks.devices, arrays, streams, strict=True):
        with cupy.cuda.Device(device), stream:
            for _ in range(20):
                cupy.add(x, 1, out=x)
            comm.all_reduce(x, out=x)
    for comm, stream, device, x in zip(ranks.comms, streams, ranks.devices, arrays, strict=True):
        comm.synchronize(stream)
        with cupy.cuda.Device(device):
            assert float(x.min()) == float(x.max()) == 40


@pytest.mark.parametrize("wrapped", [Dlpack, Interface])
def test_arrays_of_no_known_library(ranks: Gpus, wrapped: Any) -> None:
    import torch

    xs = blocks("float32")
    tensors = [ranks.put(x, r) for r, x in enumerate(xs)]
    outs = [torch.empty_like(x) for x in tensors]

    def both(comm: Any, r: int, stream: Any) -> None:
        with torch.cuda.device(ranks.devices[r]):  # torch exports tensors of the current GPU only
            comm.all_reduce(wrapped(tensors[r]), out=wrapped(outs[r]), stream=stream)
            comm.all_to_all(wrapped(tensors[r]), out=wrapped(tensors[r]), stream=stream)

    ranks.run(both)
    for r in range(2):
        assert np.array_equal(outs[r].cpu().numpy(), xs[0] + xs[1])
        assert np.array_equal(tensors[r].cpu().numpy(), np.stack([x[r] for x in xs]))


def test_default_stream_by_its_handle() -> None:
    """A new output belongs to stream 0. From ExternalStream(0), torch would make another stream, whose memory
    it reuses without a wait."""
    import torch

    with gpus(1) as one:
        made = one.comms[0].all_gather(torch.ones(1 << 22, device="cuda:0"), stream=0)
    at = made.data_ptr()
    streams = [s["stream"] for s in torch.cuda.memory_snapshot() if 0 <= at - s["address"] < s["total_size"]]
    assert streams == [0]


def test_refused_arrays(ranks: Gpus) -> None:
    import torch

    comm, device = ranks.comms[0], ranks.devices[0]
    x = torch.ones(4, 6, device=device)
    with pytest.raises(unisono.UsageError, match="pass out"):
        comm.all_reduce(Dlpack(x))
    for wrapped in (Dlpack, Interface):
        with pytest.raises(unisono.UsageError, match=r"not contiguous|cannot be taken by DLPack"):
            comm.all_reduce(wrapped(x.t()), out=wrapped(x.t()))
    with pytest.raises(unisono.UsageError, match="elements of type"):
        comm.all_reduce(Interface(x, typestr="<c8"), out=Interface(x, typestr="<c8"))
    with pytest.raises(unisono.UsageError, match="read-only"):
        comm.all_reduce(Interface(x), out=Interface(x, data=(x.data_ptr(), True)))


@pytest.mark.parametrize(
    ("imported", "module"), [("torch, cupy", "torch"), ("cupy", "cupy"), ("numpy", None)]
)
def test_symmetric_memory_is_an_array_of_the_library_in_use(imported: str, module: str | None) -> None:
    for name in imported.split(", "):
        pytest.importorskip(name)
    if not unisono.device_count():
        pytest.skip("needs 1 GPU: this machine has 0")
    program = f"""
import {imported}, unisono
comm = unisono.init(device=0)
x = comm.empty((3, 4), "f32")
print(type(x).__module__.partition(".")[0], hasattr(x, "__dlpack__"), hasattr(x, "__dlpack_device__"))
comm.all_reduce(x, out=x, stream=0)
comm.synchronize()
"""
    ended = processes.run([sys.executable, "-c", program])
    assert ended.code == 0, str(ended)
    library, *has_dlpack = ended.output.split()
    assert library == module or module is None
    assert has_dlpack == ["True", "True"]
