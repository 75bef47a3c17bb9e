"""What carries data between nodes: a library that is there already, behind one small protocol."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..errors import UsageError
from .topology import Topology

__all__ = ["ENGINE_VARIABLE", "Engine", "Part", "Pending", "Setting", "make"]

ENGINE_VARIABLE = "UNISONO_ENGINE"


class Part(NamedTuple):
    """Bytes to or from a rank of another node: a flat array of bytes (numpy; on GPUs torch), never empty."""

    rank: int
    data: Any


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Returns when all has been received, and what was sent may be overwritten; on GPUs when it is
        queued. Raises TimeoutError past the deadline, PeerLostError where a peer has gone; both name it."""


class Engine(Protocol):
    """Messages between ranks of different nodes. Between two ranks they arrive in the order of the calls, and
    each is received with the length that it was sent with."""

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Pending:
        """Starts all of them, each to or from another rank; the memory belongs to the engine until `wait` has
        returned. All ranks begin their exchanges in the same order, and both ends of a message are in the
        same one, so that an engine may do one after the other."""

    def close(self) -> None:
        """Frees what was made. Idempotent, not collective."""


@dataclass(frozen=True)
class Setting:
    """What an engine is made of. `bootstrap` is that of all ranks; `look` raises what has gone wrong within
    the node, and is called every few milliseconds of a wait, but for those of libraries that block."""

    bootstrap: Any
    topology: Topology
    timeout_s: float
    look: Callable[[], object]

    def who(self, rank: int) -> str:
        """A peer, for the text of errors."""
        return f"rank {rank} (node {self.topology.node_of[rank]})"


def make(setting: Setting, env: Mapping[str, str] = os.environ) -> Engine:
    """The engine for the host's memory: MPI where it has started the ranks, else gloo. Collective.

    UNISONO_ENGINE names another, or the fabric lane. Raises UsageError, or ResourceError, where the engine
    cannot be used, which says what to do.
    """
    from ..bootstrap.mpi import MpiBootstrap

    over_mpi = isinstance(setting.bootstrap, MpiBootstrap)
    name = env.get(ENGINE_VARIABLE) or ("mpi" if over_mpi else "gloo")
    if name == "mpi":
        if not over_mpi:
            raise UsageError(
                f"{ENGINE_VARIABLE}=mpi needs ranks that MPI has started: use mpiexec or srun, or unset it."
            )
        from .mpi import MpiEngine

        return MpiEngine(setting)
    if name == "gloo":
        from .gloo import GlooEngine

        return GlooEngine(setting)
    if name == "fabric":
        from .fabric import FabricEngine

        return FabricEngine(setting)
    raise UsageError(
        f"{ENGINE_VARIABLE}={name} is no engine between nodes: use mpi, gloo or fabric, or unset it."
    )
