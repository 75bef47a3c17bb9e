"""Joins the ranks of a launcher, or starts ranks: by MPI's mpiexec, so that the mpi backend runs in the same
processes as the others, or by the local launcher of `unisono run`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec

from unisono import launch
from unisono.bench.cases import CaseError
from unisono.bench.cuda.device import count, missing, prepare_environment
from unisono.bench.mpis import Mpi, find_mpiexec, mpiexec_command
from unisono.bench.options import Options
from unisono.bootstrap.client import die_with_parent
from unisono.launch.run import outside_launchers
from unisono.launch.signals import signals_to, stop_with

# Variables by which launchers say that they started several processes.
_COUNTS = (
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PALS_SIZE",
)


def joined_world(env: Mapping[str, str], ranks: int | None) -> launch.World | None:
    """Returns the world to join if this process is one of several, None if it is to start the ranks itself.

    Raises CaseError if `ranks` contradicts the launcher. Also if the environment shows a launcher of several
    processes, but gives this one no rank: each process would then run as a separate copy."""
    world = launch.from_env(env)
    if world.size > 1:
        if ranks is not None and ranks != world.size:
            raise CaseError(
                f"--ranks {ranks}, but {world.launcher} started {world.size}: leave --ranks out, or start "
                "the bench alone."
            )
        return world
    for name in _COUNTS:
        if env.get(name, "").isdigit() and int(env[name]) > 1:
            raise CaseError(
                f"{name}={env[name]} shows that a launcher started several processes, but nothing says which "
                "one this is, and they would run as separate copies. Start the bench alone with --ranks, or "
                "under mpiexec, srun or torchrun."
            )
    return None


def default_ranks(cores: int) -> int:
    """Returns the number of cores, but at least 2 and at most 8."""
    return min(max(cores, 2), 8)


def ranks_to_start(asked: int | None, device: str, cores: int) -> int:
    """Returns `asked`, else one a core, on GPUs one a GPU. Raises CaseError if the GPUs are too few."""
    if device != "cuda":
        return asked or default_ranks(cores)
    why = missing()
    if why is None and (asked or 1) > count():
        why = f"--ranks {asked} --device cuda needs a GPU for each rank, and {count()} can be seen here."
    if why is not None:
        raise CaseError(why)
    return asked or count()


def start(options: Options, ranks: int, mpi: Mpi | None = None) -> int:
    """Runs `ranks` ranks of the bench to their end, under `mpi`, or as its backends need. Returns the
    launcher's exit code.

    After one Ctrl-C every rank stops at its next batch; a second one ends the ranks."""
    if options.device == "cuda":
        prepare_environment(os.environ)
    if options.threads:
        options, ranks = msgspec.structs.replace(options, threads=ranks), 1
    word = [sys.executable, "-m", "unisono.bench.rank", options.pack()]
    if mpi is not None:
        return run_mpiexec([*mpiexec_command(mpi.mpiexec, ranks), *word], mpi.env)
    mpiexec = find_mpiexec() if "mpi" in options.backends and find_spec("mpi4py") else None
    if mpiexec is None:
        return launch.run_local(ranks, word)
    return run_mpiexec([*mpiexec_command(mpiexec, ranks), *word])


def run_mpiexec(argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Runs an mpiexec, which ends with this process. Returns its exit code. `env`: further variables.

    Passes SIGINT, SIGTERM and SIGHUP on as SIGINT: mpiexec gives the first to the ranks, and ends at the
    second. Ctrl-Z stops mpiexec and the ranks."""
    child = subprocess.Popen(
        argv,
        env=outside_launchers(os.environ, batch_system=False) | dict(env or {}),
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509  (no other thread runs Python)
    )

    def handle(number: int) -> None:
        if number == signal.SIGTSTP:
            stop_with(partial(_send, _family(child.pid)))
        else:
            child.send_signal(signal.SIGINT)

    try:
        with signals_to(handle):
            return child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _family(pid: int) -> list[int]:
    """Returns a process and all its descendants. mpiexec's ranks are in sessions of their own, in which
    SIGTSTP does nothing."""
    found = [pid]
    with contextlib.suppress(OSError):  # the process has ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [one for child in path.read_text().split() for one in _family(int(child))]
    return found


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
