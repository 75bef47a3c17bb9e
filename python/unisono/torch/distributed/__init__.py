"""The torch.distributed backend: `torch.distributed.init_process_group("unisono")`.

An installed Unisono has told PyTorch the name. `register` does so where PyTorch looks up no entry points.
"""

from __future__ import annotations

from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo

from unisono_torch import register

from ...errors import ResourceError, UsageError
from .build import load
from .meeting import meet

__all__ = ["create", "empty", "make_gloo", "make_nccl", "register"]


def create(options: Any, backend_options: Any = None) -> Any:
    """Returns the backend of a new process group. PyTorch calls it on every rank of the group.

    Args:
        options: `_DistributedBackendOptions` of PyTorch: store, rank, size, timeout, name.
        backend_options: None. The backend has no options of its own.

    Returns:
        The `torch.distributed.Backend`.

    Raises:
        ResourceError: The adapter cannot be built. The message says what to do.
        TimeoutError: Ranks have not come, which the message names.
        UsageError: There are options.
    """
    if backend_options is not None:
        raise UsageError("the backend unisono has no options: leave pg_options out.")
    timeout: timedelta = options.timeout
    rank, size = options.group_rank, options.group_size
    adapter = load()
    name = meet(PrefixStore("unisono", options.store), rank, size, timeout)
    store = PrefixStore(name, options.store)
    gloo = make_gloo(store, rank, size, timeout.total_seconds())
    return adapter.make(
        PrefixStore("unisono", store), rank, size, timeout.total_seconds(), options.group_id, gloo
    )


def empty(
    size: int | tuple[int, ...], dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns a tensor for CPUs on memory that every rank of the group reaches. Collective.

    The group's calls on such tensors, and on parts of them, take fewer copies. Memory whose tensors are gone
    is used again. Other groups and torch itself take such a tensor as any other.

    Args:
        size: Its shape, whose bytes are the same on every rank.
        dtype: Default: torch's default dtype.
        group: A group of the backend unisono. Default: the default group.

    Returns:
        The tensor, whose elements are not initialised.

    Raises:
        RuntimeError: Ranks ask for different sizes, there is no room, or the group's ranks are on several
            machines.
    """
    shape = (size,) if isinstance(size, int) else tuple(size)
    cpu = torch.device("cpu")
    backend: Any = (group or dist.group.WORLD)._get_backend(cpu)
    flat = backend.allocate_tensor(prod(shape), dtype=dtype or torch.get_default_dtype(), device=cpu)
    tensor: torch.Tensor = flat.view(shape)
    return tensor


def make_gloo(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Returns torch's backend for CPUs, which carries a group's calls that Unisono lacks there. Collective.

    Takes what `make_nccl` takes.
    """
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=timedelta(seconds=timeout_s))


def make_nccl(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Returns torch's backend for GPUs, which carries a group's calls that Unisono lacks there.

    Args:
        store: Of the group.
        rank: In the group.
        size: Of the group.
        timeout_s: Of the group, in seconds.

    Returns:
        The `torch.distributed.Backend`. It meets the other ranks in its first call.

    Raises:
        ResourceError: This torch has none.
    """
    if not dist.is_nccl_available():
        raise ResourceError(
            "NCCL would carry this call on GPUs, and this torch has none: make it on CPU tensors, or see by "
            "UNISONO_LOG=1 what Unisono lacks for it."
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
