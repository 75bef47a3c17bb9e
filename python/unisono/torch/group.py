"""A communicator of the ranks of a torch ProcessGroup."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from .. import communicator
from .._core import Communicator
from ..bootstrap.base import check_payload
from ..errors import PeerLostError

__all__ = ["GroupBootstrap", "communicator_of"]


class GroupBootstrap:
    """The bootstrap over a ProcessGroup of any backend. See `unisono.bootstrap.Bootstrap`."""

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._group = group

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `unisono.bootstrap.Bootstrap.all_gather`."""
        gathered: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(gathered, check_payload(data), group=self._group)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} does not reach the others over their process group ({error}): see that "
                "none of them has ended, and that all make the same calls."
            ) from error
        return gathered

    def close(self) -> None:
        """Leaves the group, which is the caller's, as it is."""


def communicator_of(group: Any, device: int | None, timeout_s: float | None = None) -> Communicator:
    """Returns a new communicator of the group's ranks, with `device` as `unisono.init` has it. Collective."""
    return communicator.init(bootstrap=GroupBootstrap(group), device=device, timeout_s=timeout_s)
