"""Arrays as inputs and outputs: numpy, ml_dtypes, torch, without copies; in place, of any shape and size."""

from __future__ import annotations

import array
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranks
import threads
import unisono

F32 = np.float32
DTYPES = [
    *(np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int32, np.int64),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
Call = Callable[[unisono.Communicator], Any]


def on_two(body: Call) -> list[Any]:
    return threads.with_threads(2, body)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_comes_back(dtype: Any) -> None:
    def body(comm: unisono.Communicator) -> None:
        x = np.full((3, 2), comm.rank + 1).astype(dtype)
        total = comm.all_reduce(x)
        assert type(total) is np.ndarray
        assert (total.dtype, total.shape) == (x.dtype, x.shape)
        assert (total.astype(F32) == 3).all()
        assert comm.all_gather(x).dtype == x.dtype
        assert (x.astype(F32) == comm.rank + 1).all(), "the input has changed"

    on_two(body)


@pytest.mark.parametrize("code", "b B h H i I l L q Q f d e ?".split())
def test_every_format_of_the_buffer_protocol(code: str) -> None:
    """Types of the same size and kind have several names. Known ones are taken, others refused by name."""
    known = code not in "hHILQ?"
    x = np.ones(4, np.dtype(code))

    def body(comm: unisono.Communicator) -> Any:
        return comm.all_reduce(x)

    with threads.team(2) as comms:
        results = threads.attempt(comms, body)
    for result in results:
        if known:
            assert (result == 2).all() and result.dtype == x.dtype
        else:
            assert isinstance(result, unisono.UsageError)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 3), (0, 4), (4, 0), (1, 1, 1, 1, 7)], ids=str)
def test_every_shape(shape: tuple[int, ...]) -> None:
    def body(comm: unisono.Communicator) -> None:
        n, x = comm.size, np.full(shape, comm.rank, F32)
        row = np.full((n, *shape), comm.rank, F32)
        assert comm.all_reduce(x).shape == shape
        assert comm.all_gather(x).shape == (n, *shape)
        assert comm.reduce_scatter(row).shape == shape
        assert comm.all_to_all(row).shape == (n, *shape)
        assert comm.scatter(row, root=1).shape == shape
        assert comm.broadcast(x, root=1).shape == shape
        assert comm.send_recv(x, 1 - comm.rank, None, 1 - comm.rank).shape == shape
        gathered, reduced = comm.gather(x, root=1), comm.reduce(x, root=1)
        if comm.rank == 1:
            assert (gathered.shape, reduced.shape) == ((n, *shape), shape)
        else:
            assert gathered is None and reduced is None

    on_two(body)


def test_a_call_returns_its_out() -> None:
    def body(comm: unisono.Communicator) -> None:
        x, row = np.ones(4, F32), np.ones((2, 4), F32)
        whole = np.empty((2, 4), F32)
        mine = np.empty(4, F32)
        assert comm.all_reduce(x, out=mine) is mine
        assert comm.all_reduce(x, out=x) is x
        assert comm.all_gather(x, out=whole) is whole
        assert comm.reduce_scatter(row, out=mine) is mine
        assert comm.all_to_all(row, out=whole) is whole
        assert comm.scatter(row, out=mine) is mine
        assert comm.broadcast(x) is x
        assert comm.broadcast(x, out=mine) is mine
        assert comm.recv(mine, 1) is mine if comm.rank == 0 else comm.send(x, 0) is None
        assert comm.send_recv(x, 1 - comm.rank, mine, 1 - comm.rank) is mine
        assert comm.gather(x, root=0, out=whole) is (whole if comm.rank == 0 else None)
        assert comm.reduce(x, root=0, out=mine) is (mine if comm.rank == 0 else None)

    on_two(body)


def test_in_place_forms() -> None:
    def body(comm: unisono.Communicator) -> None:
        n, rank = comm.size, comm.rank
        blocks = np.arange(n * 3, dtype=F32).reshape(n, 3)
        whole = np.zeros((n, 3), F32)
        whole[rank] = blocks[rank]
        assert (comm.all_gather(whole[rank], out=whole) == blocks).all()
        whole[:] = 0
        whole[rank] = blocks[rank]
        comm.gather(whole[rank], root=n - 1, out=whole)
        assert rank != n - 1 or (whole == blocks).all()
        whole = blocks.copy()
        assert (comm.reduce_scatter(whole, out=whole[rank]) == n * blocks[rank]).all()
        whole = blocks.copy()
        assert (comm.scatter(whole, root=n - 1, out=whole[rank]) == blocks[rank]).all()
        whole = blocks + 100 * rank
        swapped = comm.all_to_all(whole, out=whole)
        assert (swapped == np.stack([blocks[rank] + 100 * r for r in range(n)])).all()
        x = np.full(5, rank + 1, F32)
        comm.reduce(x, root=0, out=x)
        assert (x == (n * (n + 1) / 2 if rank == 0 else rank + 1)).all()
        counts = [2] * n
        x = np.full(2 * n, rank, F32)
        comm.all_to_all_v(x, counts, counts, out=x)
        assert (x == np.repeat(np.arange(n), 2)).all()
        x = np.full(4, rank, F32)
        comm.send_recv(x, (rank + 1) % n, x, (rank - 1) % n)
        assert (x == (rank - 1) % n).all()

    for n in (1, 2, 3, 5):
        threads.with_threads(n, body)


def test_other_objects_with_memory() -> None:
    """Objects with the buffer protocol are inputs; bytearray, memoryview and array.array also outputs."""

    def body(comm: unisono.Communicator) -> None:
        values = array.array("d", [1, 2, 3])
        out = array.array("d", [0, 0, 0])
        assert comm.all_reduce(values, out=out).tolist() == [2, 4, 6]
        view = memoryview(bytearray(8)).cast("f")
        comm.all_reduce(np.float32([comm.rank, 5]), out=view)
        assert view.tolist() == [1, 10]
        got = bytearray(5)
        comm.broadcast(b"hello" if comm.rank == 0 else bytes(5), out=got)
        assert got == b"hello"
        assert float(comm.all_reduce(np.float32(4))) == 8

    on_two(body)


def test_input_may_be_read_only() -> None:
    x = np.arange(6, dtype=F32)
    x.flags.writeable = False

    def body(comm: unisono.Communicator) -> None:
        assert comm.all_reduce(x)[5] == 10
        assert comm.all_gather(x).sum() == 30

    on_two(body)


def test_broadcast_needs_no_writing_at_the_root() -> None:
    def body(comm: unisono.Communicator) -> Any:
        x = np.full(4, comm.rank, F32)
        x.flags.writeable = comm.rank != 1
        return comm.broadcast(x, root=1).tolist()

    assert on_two(body) == [[1] * 4] * 2


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 5, 7, 8, 31, 63])
def test_any_alignment(shift: int) -> None:
    """Elements need not lie at multiples of their size."""

    def body(comm: unisono.Communicator) -> None:
        for count in (1, 15, 1000, 40_000):
            x = np.frombuffer(bytearray(count * 8 + shift), np.float64, count, shift)
            out = np.frombuffer(bytearray(count * 8 + 64), np.float64, count, 64 - shift)
            x[:] = np.arange(count) + comm.rank
            assert (comm.all_reduce(x, out=out) == 2 * np.arange(count) + 1).all()

    on_two(body)


def test_views_of_a_larger_array() -> None:
    """Only the view is written, not the array around it."""

    def body(comm: unisono.Communicator) -> None:
        large = np.full((10, 1000), 7, F32)
        comm.all_reduce(np.ones((3, 1000), F32), out=large[4:7])
        assert (large[4:7] == 2).all()
        assert (large[:4] == 7).all() and (large[7:] == 7).all()

    on_two(body)


# ---- torch ------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_tensors() -> None:
    import torch

    names = "float32 float64 float16 bfloat16 int8 uint8 int32 int64 float8_e4m3fn float8_e5m2".split()

    def body(comm: unisono.Communicator) -> None:
        for name in names:
            dtype = getattr(torch, name)
            x = torch.full((3, 2), comm.rank + 1.0).to(dtype)
            total = comm.all_reduce(x)
            assert isinstance(total, torch.Tensor) and total.dtype == dtype and total.shape == x.shape
            assert (total.to(torch.float32) == 3).all(), name
            assert comm.all_reduce(x, out=x) is x
            assert comm.all_gather(x).shape == (2, 3, 2)
        mixed = comm.all_reduce(torch.ones(3), out=np.empty(3, F32))
        assert isinstance(mixed, np.ndarray) and (mixed == 2).all()
        parameter = torch.nn.Parameter(torch.ones(3))
        assert (comm.all_reduce(parameter.detach()) == 2).all()
        assert comm.all_reduce(torch.ones(())).shape == ()
        assert comm.all_gather(torch.ones(0, 3)).shape == (2, 0, 3)

    on_two(body)


@pytest.mark.torch
def test_torch_tensors_that_do_not_fit() -> None:
    import torch

    refused = {
        "not contiguous": torch.ones(4, 4).t(),
        "elements of type torch.bool": torch.ones(4, dtype=torch.bool),
        "elements of type torch.complex64": torch.ones(4, dtype=torch.complex64),
        "elements of type torch.int16": torch.ones(4, dtype=torch.int16),
        "on device meta": torch.ones(4, device="meta"),
        "not contiguous:": torch.ones(1).expand(4),
    }
    with unisono.init() as comm:
        for words, tensor in refused.items():
            with pytest.raises(unisono.UsageError, match=words):
                comm.all_reduce(tensor)


@pytest.mark.torch
def test_torch_negative_bit() -> None:
    """A tensor may stand for the negatives of the values in its memory."""
    import torch

    pairs = torch.complex(torch.ones(4), torch.full((4,), 2.0))
    negated = [pairs[:1].conj().imag, pairs[2].conj().imag, pairs.conj().imag.as_strided((4,), (1,))]
    with unisono.init() as comm:
        assert comm.all_reduce(torch.ones(1)).item() == 1  # from here on tensors come by DLPack's table
        for tensor in negated:
            assert tensor.is_neg() and tensor.is_contiguous()
            with pytest.raises(
                unisono.UsageError, match=r"x has .* negative bit set: pass x.resolve_neg\(\)\."
            ):
                comm.all_reduce(tensor)
            with pytest.raises(
                unisono.UsageError, match=r"out has .* negative bit set: pass another tensor\."
            ):
                comm.all_reduce(torch.ones(tensor.shape), out=tensor)
            assert torch.equal(comm.all_reduce(tensor.resolve_neg()), tensor)
        for plain in (torch.ones(3)[1:], pairs[:1].imag, pairs[2].imag):
            assert torch.equal(comm.all_reduce(plain), plain)


@pytest.mark.torch
def test_torch_class() -> None:
    import torch

    with unisono.init() as comm, pytest.raises(unisono.UsageError, match=r"x is the class torch\.Tensor: "):
        comm.all_reduce(torch.Tensor)  # type: ignore[arg-type]


class CudaArray:
    """An array that says that it lies on a GPU, as cupy's arrays do."""

    def __init__(self, described: Any, dtype: str = "float32") -> None:
        self.__cuda_array_interface__ = described
        self.dtype = np.dtype(dtype)
        self.device = SimpleNamespace(id=0)


GOOD = {"typestr": "<f4", "shape": (4,), "data": (4096, False), "version": 3}


@pytest.mark.parametrize(
    "described",
    [
        *(None, {}, 3, "text"),
        *({**GOOD, key: wrong} for key in ("typestr", "shape", "data") for wrong in (None, 3, b"bytes")),
        {**GOOD, "shape": (-1,)},
        {**GOOD, "data": ()},
        {**GOOD, "data": ("here", False)},
        {**GOOD, "strides": (4, 4)},
        {**GOOD, "strides": ()},
        {**GOOD, "strides": "abcd"},
    ],
    ids=str,
)
def test_malformed_cuda_array_interface(described: Any) -> None:
    with unisono.init() as comm:
        for call in (
            lambda: comm.all_reduce(CudaArray(described)),
            lambda: comm.all_reduce(np.ones(4, F32), out=CudaArray(described)),
        ):
            with pytest.raises(
                unisono.UsageError, match=r"^(x|out) (is a .*CudaArray, whose|has elements of)"
            ):
                call()
        assert comm.all_reduce(np.ones(4, F32))[3] == 1


def test_cuda_array_without_a_gpu() -> None:
    """The array is refused in words, also without cupy for an output."""
    with unisono.init() as comm:
        x = CudaArray(GOOD)
        with pytest.raises(
            unisono.UsageError, match=r"CudaArray, from which no new array can be made: pass out\."
        ):
            comm.all_reduce(x)
        with pytest.raises(unisono.UsageError, match="the communicator has no GPU"):
            comm.all_reduce(x, out=x)


# ---- long arrays ------------------------------------------------------------------------------------------


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("far", ["1", "0"])
def test_beyond_2_to_31_elements(far: str) -> None:
    if _available_bytes() < 6 << 30:
        pytest.skip("two buffers of 2 GiB need 6 GiB of free memory")
    outcome = ranks.play(2, "basic_programs:beyond_2_to_31", "u1", env={"UNISONO_FAR": far}, timeout_s=120)
    assert outcome.results() == [[10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 77, 78, 79]] * 2


class Dlpack:
    """An array that offers only DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_dlpack() -> None:
    def body(comm: unisono.Communicator) -> None:
        x, total = np.full((2, 3), comm.rank + 1, F32), np.zeros((2, 3), F32)
        comm.all_reduce(Dlpack(x), out=Dlpack(total))
        assert (total == 3).all()
        with pytest.raises(unisono.UsageError, match="Dlpack, from which no new array can be made: pass out"):
            comm.all_reduce(Dlpack(x))
        with pytest.raises(unisono.UsageError, match="not contiguous"):
            comm.all_reduce(Dlpack(x.T), out=x)
        kept = np.zeros((2, 3), F32)
        kept.flags.writeable = False
        with pytest.raises(unisono.UsageError, match=r"out (is read-only|cannot be taken by DLPack)"):
            comm.all_reduce(x, out=Dlpack(kept))
        assert (kept == 0).all()

    on_two(body)


def test_refused_arrays_are_released() -> None:
    shorts, turned = array.array("H", [1, 2, 3]), np.ones((3, 4), F32).T
    there = weakref.ref(turned)
    with unisono.init() as comm:
        for refused in (shorts, turned):
            with pytest.raises(unisono.UsageError):
                comm.all_reduce(refused)
        shorts.append(4)  # a BufferError while somebody holds it
        del turned, refused
        assert there() is None
