"""GPU memory for the pools of `buffers`: torch tensors of bytes, viewed as a case's dtype."""

from __future__ import annotations

from math import prod
from typing import Any

from unisono.bench.buffers import POISON, Region
from unisono.records.vocabulary import DTYPES

_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def torch_dtype(dtype: str) -> Any:
    """Returns torch's type of a case's dtype."""
    import torch

    return getattr(torch, DTYPES[dtype].name)


def bits_dtype(dtype: str) -> Any:
    """Returns torch's integer type of the width of a case's dtype."""
    import torch

    return getattr(torch, _BITS[DTYPES[dtype].itemsize])


def one_bits(dtype: str) -> int:
    """Returns the bit pattern of 1 in a case's dtype."""
    kind = DTYPES[dtype]
    one = kind.type(1).tobytes()
    return int.from_bytes(one, "little")


def tensor_of(array: Any, device: str) -> Any:
    """Returns an array of numpy as a tensor on a device."""
    import torch

    if array.dtype.kind != "V":
        return torch.tensor(array, device=device)
    bits = torch.tensor(array.view(_BITS[array.itemsize]), device=device)  # a dtype of ml_dtypes
    return bits.view(getattr(torch, array.dtype.name))


def numpy_of(tensor: Any, dtype: str) -> Any:
    """Returns a tensor of a case's dtype as an array of numpy."""
    return tensor.cpu().view(bits_dtype(dtype)).numpy().view(DTYPES[dtype])


class TensorRegion(Region):
    """A flat torch tensor of bytes."""

    memory: Any

    def view(self, shape: tuple[int, ...], dtype: str, start: int = 0) -> Any:
        end = start + prod(shape) * DTYPES[dtype].itemsize
        return self.memory[start:end].view(torch_dtype(dtype)).reshape(shape)

    def fill_ones(self, end: int, dtype: str) -> None:
        self.memory[:end].view(bits_dtype(dtype)).fill_(one_bits(dtype))

    def fill_random(self, end: int, dtype: str) -> None:
        self.memory[:end].view(torch_dtype(dtype)).normal_()

    def poison(self, end: int | None = None) -> None:
        self.memory[:end].fill_(POISON)


def device_region(size: int, device: int) -> TensorRegion:
    """Returns `size` bytes of a GPU's memory."""
    import torch

    return TensorRegion(torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}"))


class _Foreign:
    """`size` bytes at a device address, for torch.as_tensor; `owner` keeps them alive."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, size: int, device: int, owner: object) -> Any:
    """Returns a tensor over memory that torch has not allocated. The tensor keeps `owner` alive."""
    import torch

    found = torch.as_tensor(_Foreign(address, size, owner), device=f"cuda:{device}")
    if found.data_ptr() != address:
        raise RuntimeError("torch copied memory that it was to use in place: it takes it for another GPU's.")
    return found


def flat_bytes(array: Any, device: int) -> Any:
    """Returns an array of `comm.empty`, of any library, as a flat tensor of bytes."""
    import torch

    tensor = array if isinstance(array, torch.Tensor) else torch.as_tensor(array, device=f"cuda:{device}")
    return tensor.reshape(-1).view(torch.uint8)
