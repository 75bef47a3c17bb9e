"""C programs: the ranks of `unisono run`, and ranks that meet by a callback."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import mpi_programs
import ranks

ROOT = Path(__file__).resolve().parents[2]

# Rank 1 ends before it has met the others.
LEAVES = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "unisono/unisono.h"
int main(void) {
  unisono_comm* comm;
  if (!strcmp(getenv("UNISONO_RANK"), "1")) return 5;
  const int status = unisono_init(NULL, &comm);
  printf("status %d: %s\n", status, unisono_error_text());
  return status == UNISONO_ERROR_PEER_LOST && !comm ? 0 : 1;
}
"""

# Rank 1 is killed in the middle of the run.
DIES = r"""
#include <stdio.h>
#include <stdlib.h>
#include "unisono/unisono.h"
int main(void) {
  unisono_comm *comm, *other;
  if (unisono_init(NULL, &comm) || unisono_init(NULL, &other)) return 1;
  if (unisono_run(comm, UNISONO_BARRIER, NULL)) return 2;
  if (unisono_rank(comm) == 1) abort();
  const int status = unisono_run(other, UNISONO_BARRIER, NULL);
  printf("status %d: %s\n", status, unisono_error_text());
  unisono_free(other);
  unisono_free(comm);
  return status == UNISONO_ERROR_PEER_LOST ? 0 : 3;
}
"""


def build(source: Path, program: Path) -> Path:
    """Compiles a program as C11 and links it with the shared library."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None or not mpi_programs.LIBRARY.exists():
        pytest.skip("there is no C compiler (install gcc), or no library (make .venv/.have-unisono)")
    folder = mpi_programs.LIBRARY.parent
    flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'include'}"]
    links = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lunisono"]
    ended = ranks.run([compiler, *flags, str(source), "-o", str(program), *links])
    assert ended.code == 0, str(ended)
    return program


def build_text(code: str, folder: Path) -> Path:
    source = folder / "program.c"
    source.write_text(code)
    return build(source, folder / "program")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "examples" / "11_all_reduce.c", tmp_path_factory.mktemp("c") / "all_reduce")


def assert_sums(output: str, n: int) -> None:
    for rank in range(n):
        assert f"the sum is {n * (n + 1) // 2} on rank {rank} of {n}\n" in output, output


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_of_the_launcher(example: Path, n: int) -> None:
    ended = ranks.launch(n, [str(example)])
    assert ended.code == 0, str(ended)
    assert_sums(ended.output, n)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_that_meet_by_a_callback(example: Path, n: int, tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [example, str(rank), str(n), tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]
    try:
        outputs = [one.communicate(timeout=60)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0] * n, outputs
    assert_sums("".join(outputs), n)


def test_a_callback_that_fails(example: Path, tmp_path: Path) -> None:
    ended = ranks.run([str(example), "0", "2", str(tmp_path / "missing")])
    assert ended.code == 1, str(ended)
    assert "bootstrap->all_gather has returned 1 on rank 0" in ended.output, ended.output


def test_another_launcher(example: Path) -> None:
    ended = ranks.run([str(example)], {"WORLD_SIZE": "2"})
    assert ended.code == 1, str(ended)
    assert "WORLD_SIZE=2 says that there are several ranks" in ended.output, ended.output


def test_a_rank_that_leaves_before_it_has_met_the_others(tmp_path: Path) -> None:
    ended = ranks.launch(3, [str(build_text(LEAVES, tmp_path))])
    assert ended.code == 5, str(ended)
    assert ended.output.count("status 4: rank 1 exited with status 5") == 2, ended.output


def test_a_rank_that_dies(tmp_path: Path) -> None:
    ended = ranks.launch(3, [str(build_text(DIES, tmp_path))])
    assert ended.code == 134, str(ended)
    assert ended.output.count("status 4: rank 1") == 2, ended.output
