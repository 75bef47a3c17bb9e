"""The communicator of vLLM's groups on CPUs. Tensor parallel groups call Unisono, others what vLLM has."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from ..group import communicator_of

__all__ = ["UnisonoCommunicator"]

SUMMED = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64)


class UnisonoCommunicator(CpuCommunicator):  # type: ignore[misc]
    """vLLM's communicator, whose all_reduce, all_gather and gather of a tensor parallel group are Unisono's.

    It takes any number of ranks of one machine, which get the same bits, and its waits end at the group's
    timeout. The ranks of several machines stay with torch.distributed.
    """

    def __init__(
        self,
        cpu_group: Any,
        device: torch.device | None = None,
        device_group: Any = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        self._comm: Any = None
        self._taken = unique_name.startswith("tp")
        super().__init__(cpu_group, device, device_group, unique_name, use_all2all=use_all2all)
        if self._taken:
            backend = cpu_group._get_backend(torch.device("cpu"))
            comm = communicator_of(cpu_group, None, backend.options._timeout.total_seconds())
            if len(comm.nodes) == 1:
                self._comm = comm
            else:
                comm.close()

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        """Returns False for a group that needs no shared memory of vLLM's."""
        return not self._taken and bool(super()._all_group_ranks_share_shm_group_name())

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if self._comm is None or input_.dtype not in SUMMED:
            return super().all_reduce(input_)
        if input_.is_contiguous():
            self._comm.all_reduce(input_, out=input_)
        else:
            input_.copy_(self._comm.all_reduce(input_.contiguous()))
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self._comm is None:
            return super().all_gather(input_, dim)
        parts = input_.new_empty((self.world_size, *input_.shape))
        self._comm.all_gather(_bytes(input_), _bytes(parts))
        return torch.cat(parts.unbind(), dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        if self._comm is None:
            return super().gather(input_, dst, dim)
        if self.rank_in_group != dst:
            self._comm.gather(_bytes(input_), dst)
            return None
        parts = input_.new_empty((self.world_size, *input_.shape))
        self._comm.gather(_bytes(input_), dst, _bytes(parts))
        return torch.cat(parts.unbind(), dim)

    def destroy(self) -> None:
        if self._comm is not None:
            self._comm.close()
            self._comm = None
        super().destroy()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor, of any dtype, a row for each element of the first dimension."""
    return tensor.contiguous().view(torch.uint8)
