"""The bootstrap over MPI, under mpiexec."""

from __future__ import annotations

import sys

import pytest

from bootstrap_programs import GATHER, MAKE, MEET, shell
from unisono.bench.mpis import find_mpiexec, mpiexec_command

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("ranks_find_unisono")]


def _mpiexec(n: int, code: str) -> tuple[int, list[str], str]:
    return shell([*mpiexec_command(str(find_mpiexec()), n), sys.executable, "-c", code])


@pytest.mark.mpi
def test_mpi() -> None:
    status, lines, errors = shell([*mpiexec_command(str(find_mpiexec()), 3), sys.executable, str(GATHER)])
    assert (status, lines) == (0, [f"{rank} 3 MpiBootstrap" for rank in range(3)]), errors


@pytest.mark.mpi
def test_mpi_communicators_of_the_user() -> None:
    code = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
def refused(comm):
    try:
        bootstrap.make(world, comm)
    except errors.UsageError as error:
        return str(error)
assert "MPI is not running" in refused(MPI.COMM_WORLD)
MPI.Init()
half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
assert "has no group" in refused(MPI.COMM_NULL)
b = bootstrap.make(world, half)
assert bootstrap.make(launch.World(b.rank, b.size, 0, 1, "explicit"), half).size == b.size
say(MPI.COMM_WORLD.rank, b.rank, b.size, b.all_gather(b"%d" % MPI.COMM_WORLD.rank))
b.close()
try:
    b.all_gather(b"")
except errors.UsageError as error:
    assert "closed" in str(error)
MPI.Finalize()
"""
    status, lines, errors = _mpiexec(3, MAKE + code)
    assert (status, lines) == (0, ["0 0 2 [b'0', b'2']", "1 0 1 [b'1']", "2 1 2 [b'0', b'2']"]), errors


@pytest.mark.mpi
def test_mpi_a_rank_that_never_arrives_is_an_error_and_no_hang() -> None:
    code = """
b = bootstrap.make(world, timeout_s=60)
if b.rank == 1:
    os.read(os.pipe()[0], 1)
b._timeout_s = 0.5  # not for making it, which takes both
try:
    b.all_gather(b"")
finally:
    say("after")
"""
    status, lines, errors = _mpiexec(2, MAKE + code)
    assert status != 0 and lines[0] == "after", (lines, errors)
    assert "not all of the 2 ranks called it" in errors


@pytest.mark.mpi
def test_mpi_an_exception_in_one_rank_does_not_hang_the_run() -> None:
    status, _, errors = _mpiexec(2, MEET + "if rank: raise ValueError('mine')\nb.all_gather(b'')")
    assert status != 0 and "ValueError: mine" in errors


@pytest.mark.mpi
def test_mpi_of_another_launcher_is_refused() -> None:
    """Under Open MPI's mpirun with an mpi4py on MPICH, MPI_Init would abort (see test_other_mpis.py)."""
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    status, _, errors = shell([sys.executable, "-c", MEET], **env)
    assert status == 1
    assert "as rank 1 of 4, but mpi4py's MPI (MPICH Version: " in errors, errors
    assert "is not the launcher's: it would abort, or run as 4 separate copies. Start it with" in errors


def test_missing_mpi4py_is_an_error() -> None:
    env = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    code = MAKE + "sys.modules['mpi4py'] = None\nbootstrap.make(world)"
    status, _, errors = shell([sys.executable, "-c", code], **env)
    assert status == 1 and "mpi4py is not installed: pip install mpi4py, or" in errors, errors


@pytest.mark.mpi
def test_mpi4py_without_a_library_is_an_error() -> None:
    env = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI4PY_LIBMPI": "/no/libmpi.so"}
    status, _, errors = shell([sys.executable, "-c", MEET], **env)
    assert status == 1 and "mpi4py cannot load MPI (" in errors and "pip install mpich, or" in errors, errors
