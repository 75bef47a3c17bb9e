"""C++ programs over MPI, compiled by the wrapper of the MPI whose mpiexec starts them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import ranks
from unisono.bench.start import find_mpiexec, mpiexec_command

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "tests" / "libunisono.so"


def find_mpicxx() -> str:
    """Returns the wrapper compiler beside the mpiexec. Skips the test if it or its compiler is missing."""
    mpiexec = find_mpiexec()
    wrapper = mpiexec and shutil.which("mpicxx", path=str(Path(mpiexec).parent))
    if not wrapper:
        pytest.skip(f"no mpicxx is beside {mpiexec}: pip install mpich, or install Debian's libmpich-dev")
    if ranks.run([wrapper, "--version"]).code != 0:
        pytest.skip("mpicxx finds no C++ compiler: install g++")
    return wrapper


def build(source: Path, program: Path) -> Path:
    """Compiles and links a program with the shared library. Skips the test if the library is not built."""
    wrapper = find_mpicxx()
    if not LIBRARY.exists():
        pytest.skip("build/tests has no libunisono.so: make .venv/.have-unisono")
    argv = [wrapper, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", str(source)]
    argv += [f"-L{LIBRARY.parent}", "-lunisono", f"-Wl,-rpath,{LIBRARY.parent}", "-pthread"]
    ended = ranks.run([*argv, "-o", str(program)], timeout_s=240)
    assert ended.code == 0, str(ended)
    return program


def run(layout: str, argv: Sequence[str | Path]) -> ranks.Ended:
    """Runs a program as ranks of one machine; each letter of the layout names a rank's node."""
    node = 'UNISONO_NODE=$(printf %s "$0" | cut -c$((${PMI_RANK:-$OMPI_COMM_WORLD_RANK} + 1)))'
    command = mpiexec_command(str(find_mpiexec()), len(layout))
    return ranks.run([*command, "sh", "-c", f'{node} exec "$@"', layout, *map(str, argv)])
