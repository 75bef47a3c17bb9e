"""Finds rank and size of this process in the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import UsageError

RANK_VARIABLE = "UNISONO_RANK"
SIZE_VARIABLE = "UNISONO_SIZE"
FD_VARIABLE = "UNISONO_BOOTSTRAP_FD"
NODE_VARIABLE = "UNISONO_NODE"

Launcher = Literal["explicit", "unisono", "torchrun", "openmpi", "mpich", "slurm", "none"]
# Step ids from here on are Slurm's own: batch script, interactive shell, ...
_SLURM_SPECIAL_STEP = 0xFFFFFFF0
# One part of "4(x2),3": 4 on two machines, 3 on the next.
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")
_REMEDY: dict[Launcher, str] = {
    "unisono": "start the program with `unisono run`",
    "torchrun": "start the program with torchrun",
    "openmpi": "start the program with mpirun",
    "mpich": "start the program with mpiexec",
    "slurm": "start the program with srun",
}


@dataclass(frozen=True)
class World:
    """The place of a process in a run.

    Attributes:
        rank, size: number of this process, and how many there are; 0 <= rank < size.
        local_rank, local_size: the same among the processes of this machine. If the launcher does not say,
            all ranks count as ranks of this machine.
        launcher: the source; "explicit": the user gave rank and size; "none": a process started on its own.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: Launcher

    def __post_init__(self) -> None:
        for name, rank, size in (("", self.rank, self.size), ("local_", self.local_rank, self.local_size)):
            if not 0 <= rank < size:
                raise UsageError(
                    f"{name}rank is {rank} and {name}size is {size}: rank must be from 0 to size - 1"
                )


def from_env(env: Mapping[str, str]) -> World:
    """Returns the place of this process by environment variables alone. An empty variable counts as unset.

    Order: `unisono run`, torchrun (RANK, WORLD_SIZE), Open MPI (OMPI_COMM_WORLD_*), MPICH and other PMI
    launchers (PMI_*, PMIX_RANK), a Slurm step (SLURM_PROCID; SLURM_STEP_ID distinguishes a step from a plain
    salloc shell), none. RANK and WORLD_SIZE without LOCAL_RANK come after an MPI launcher, since container
    platforms set these two for a whole pod.

    Raises:
        UsageError: a variable has no valid value, or its partner is missing. The message names the variable
            and says what to do.
    """
    env = {name: value.strip() for name, value in env.items() if value.strip()}
    unisono = _read(env, "unisono", RANK_VARIABLE, SIZE_VARIABLE)
    if unisono is not None:
        return unisono
    if "LOCAL_RANK" not in env:
        mpi = _openmpi(env) or _pmi(env)
        if mpi is not None:
            return mpi
    torchrun = _read(env, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return torchrun or _openmpi(env) or _pmi(env) or _slurm(env) or World(0, 1, 0, 1, "none")


def _openmpi(env: Mapping[str, str]) -> World | None:
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _read(env, "openmpi", *names)


def _pmi(env: Mapping[str, str]) -> World | None:
    rank = "PMIX_RANK" if "PMIX_RANK" in env and "PMI_RANK" not in env else "PMI_RANK"
    if rank == "PMIX_RANK" and "PMI_SIZE" not in env:
        if _in_slurm_step(env):
            return None  # srun --mpi=pmix: Slurm's own variables have the size
        raise UsageError(
            "PMIX_RANK is set, but no variable says how many ranks there are: call init(rank=..., size=..., "
            "bootstrap=MPI.COMM_WORLD), or unset PMIX_RANK if this process is alone"
        )
    return _read(env, "mpich", rank, "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _slurm(env: Mapping[str, str]) -> World | None:
    if not _in_slurm_step(env):
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    world = _read(env, "slurm", "SLURM_PROCID", size, "SLURM_LOCALID")
    here = _slurm_tasks_here(env)
    return replace(world, local_size=here) if world and here and world.local_rank < here else world


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    return "SLURM_STEP_ID" in env and _number(env, "SLURM_STEP_ID", "slurm") < _SLURM_SPECIAL_STEP


def _slurm_tasks_here(env: Mapping[str, str]) -> int | None:
    """Returns how many tasks of this step run on this machine, or None if Slurm does not say."""
    node = _number(env, "SLURM_NODEID", "slurm") if "SLURM_NODEID" in env else 0
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def _read(env: Mapping[str, str], launcher: Launcher, *names: str) -> World | None:
    """Returns the World in the variables `names`, or None if neither rank nor size is set.

    Args:
        names: rank, size, then local rank and local size, which may be missing.
    """
    rank, size, local_rank, local_size = (*names, "", "")[:4]
    if rank not in env and size not in env:
        return None
    for missing, there in ((rank, size), (size, rank)):
        if missing not in env:
            raise UsageError(
                f"{there} is set, but {missing} is not: {_REMEDY[launcher]}, or set both, or unset {there}"
            )
    world = _pair(env, launcher, rank, size)
    if local_rank not in env:
        return World(*world, *world, launcher)
    return World(
        *world, *_pair(env, launcher, local_rank, local_size if local_size in env else size), launcher
    )


def _pair(env: Mapping[str, str], launcher: Launcher, rank: str, size: str) -> tuple[int, int]:
    values = _number(env, rank, launcher), _number(env, size, launcher)
    if values[0] >= values[1]:
        raise UsageError(
            f"{rank}={values[0]} must be below {size}={values[1]}: {_REMEDY[launcher]}, or unset both"
        )
    return values


def _number(env: Mapping[str, str], name: str, launcher: Launcher) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", env[name]):
        raise UsageError(
            f"{name}={env[name][:80]!r} is not a whole number from 0: {_REMEDY[launcher]}, or unset {name}"
        )
    return int(env[name])
