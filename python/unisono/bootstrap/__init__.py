"""Bootstraps, by which the ranks of a run find each other: one call, an all_gather of bytes.

A bootstrap sets a communicator up and hands out symmetric memory. A user's data never passes through one.

| started by             | bootstrap         | over                                        |
|------------------------|-------------------|---------------------------------------------|
| nothing                | `SingleBootstrap` | nothing: one rank                           |
| `unisono run`          | `HubBootstrap`    | a socket inherited from the launcher        |
| mpirun, mpiexec, srun  | `MpiBootstrap`    | mpi4py (mpi.py)                             |
| torchrun               | `StoreBootstrap`  | a torch.distributed Store (store.py)        |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ..errors import UsageError
from ..launch.detect import World
from .base import Bootstrap, SingleBootstrap, check_timeout
from .client import HubBootstrap, inherited_fd
from .hub import MAX_PAYLOAD

__all__ = ["MAX_PAYLOAD", "Bootstrap", "HubBootstrap", "SingleBootstrap", "check_timeout", "make"]


def make(
    world: World,
    bootstrap: object | None = None,
    timeout_s: float = 30.0,
    env: Mapping[str, str] | None = None,
) -> Bootstrap:
    """Returns the bootstrap for this process.

    Args:
        world: rank and size of this process, from `launch.from_env` or given by the user.
        bootstrap: None to follow `world.launcher`; or an mpi4py intracommunicator, a torch.distributed Store
            (any object with `set(key, bytes)` and a blocking `get(key) -> bytes`), or an object with the
            `Bootstrap` protocol. A communicator or protocol object decides rank and size, and may hold a part
            of the world. Rank and size that the user gives as well must agree.
        timeout_s: seconds that one all_gather waits for the last rank, above 0.
        env: the environment to read addresses from, default `os.environ`.

    Raises:
        UsageError: the run cannot be joined as it was started; the message says what to do.
    """
    timeout_s = check_timeout(timeout_s)
    if bootstrap is not None:
        return _from_object(world, bootstrap, timeout_s)
    env = os.environ if env is None else env
    if world.launcher == "unisono":
        return HubBootstrap(world.rank, world.size, inherited_fd(env), timeout_s)
    if world.size == 1:
        return SingleBootstrap()
    if world.launcher == "torchrun":
        from .store import from_torchrun

        return from_torchrun(world, timeout_s, env)
    if world.launcher in ("openmpi", "mpich", "slurm"):
        from .mpi import from_launcher

        return from_launcher(world, timeout_s)
    raise UsageError(
        f"rank {world.rank} of {world.size} does not know how to reach the others: give init() bootstrap= "
        "(an mpi4py communicator or a torch.distributed Store), or start the program with `unisono run`, "
        "mpirun, srun or torchrun"
    )


def _from_object(world: World, found: object, timeout_s: float) -> Bootstrap:
    mpi = sys.modules.get("mpi4py.MPI")
    made: Bootstrap
    if mpi is not None and isinstance(found, mpi.Comm):
        from .mpi import MpiBootstrap

        made = MpiBootstrap(found, timeout_s)
    elif callable(getattr(found, "all_gather", None)) and hasattr(found, "rank") and hasattr(found, "size"):
        if not isinstance(found, Bootstrap):
            raise UsageError(
                f"bootstrap= is a {type(found).__name__} without close(): add it (Bootstrap protocol)"
            )
        made = found
    elif callable(getattr(found, "set", None)) and callable(getattr(found, "get", None)):
        from .store import StoreBootstrap

        if world.launcher == "none":
            raise UsageError(
                "a Store does not know the ranks: call init(rank=..., size=..., bootstrap=store)"
            )
        return StoreBootstrap(found, world.rank, world.size, timeout_s)
    else:
        raise UsageError(
            f"bootstrap= is a {type(found).__name__}: give an mpi4py communicator, a torch.distributed "
            "Store, or an object with rank, size, all_gather(bytes) and close()"
        )
    rank, size = made.rank, made.size
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
        raise UsageError(f"bootstrap= says rank {rank!r} of {size!r}: rank must be from 0 to size - 1")
    if world.launcher == "explicit" and (world.rank, world.size) != (rank, size):
        raise UsageError(
            f"init() was given rank {world.rank} of {world.size}, its bootstrap= says rank {rank} of {size}: "
            "leave rank and size out"
        )
    return made
