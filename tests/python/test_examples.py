"""Every example runs as it stands: alone, as several ranks, and under the launchers that it names."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

import mpi_programs
import ranks
from unisono.bench.mpis import find_mpiexec, mpiexec_command

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"from mpi4py": pytest.mark.mpi, "import torch": pytest.mark.torch}
EXAMPLES = [
    pytest.param(path, marks=[mark for line, mark in MARKS.items() if line in path.read_text()])
    for path in sorted((ROOT / "examples").glob("[0-9]*.py"))
]
SOURCES = [
    pytest.param(path, marks=[pytest.mark.mpi] if "mpi.hpp" in path.read_text() else [])
    for path in sorted((ROOT / "examples").glob("[0-9]*.cpp"))
]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
    numbers = [path.name.split("_")[0] for path in sorted((ROOT / "examples").glob("[0-9]*"))]
    assert len(set(numbers)) == len(numbers), numbers


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_alone(path: Path) -> None:
    ended = ranks.run([sys.executable, str(path)])
    assert ended.code == 0, str(ended)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_as_ranks(path: Path) -> None:
    if "mpi4py" in path.read_text() or "init_threads" in path.read_text():
        pytest.skip("this example has a launcher of its own, or needs none")
    ended = ranks.launch(3, [sys.executable, str(path)])
    assert ended.code == 0, str(ended)
    assert ended.output.strip(), "it prints nothing"


@pytest.mark.mpi
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_under_mpiexec(path: Path) -> None:
    ended = ranks.run([*mpiexec_command(str(find_mpiexec()), 2), sys.executable, str(path)])
    assert ended.code == 0, str(ended)
    assert ended.output.strip(), "it prints nothing"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_cpp(path: Path) -> None:
    """Compiles against the public headers alone; CTest (tests/cpp) or test_nodes_cpp.py runs it."""
    if "mpi.hpp" in path.read_text():
        compiler = mpi_programs.beside_python().find_mpicxx()
    elif (found := shutil.which(os.environ.get("CXX", "g++"))) is not None:
        compiler = found
    else:
        pytest.skip("there is no C++ compiler: install g++")
    ended = ranks.run([compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'include'}", str(path)])
    assert ended.code == 0, str(ended)
