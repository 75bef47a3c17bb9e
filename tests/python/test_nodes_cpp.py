"""C++ programs across nodes: the user's own MPI through include/unisono/mpi.hpp."""

from __future__ import annotations

from pathlib import Path

import pytest

import hosts
import mpi_programs
import ranks

pytestmark = pytest.mark.mpi

# With an argument, MPI ends while the communicator is in use; without, it never begins.
ENDED = r"""
#include <cstdio>
#include <optional>
#include "unisono/mpi.hpp"
int main(int argc, char** argv) {
  const float x = 1;
  float y = 0;
  std::optional<unisono::Communicator> comm;
  try {
    if (argc == 1) comm = unisono::mpi::communicator(MPI_COMM_WORLD);
    MPI_Init(&argc, &argv);
    comm = unisono::mpi::communicator(MPI_COMM_WORLD, {.timeout_s = 30});
    comm->all_reduce({.in = &x, .out = &y, .count = 1});
    MPI_Finalize();
    comm->all_reduce({.in = &x, .out = &y, .count = 1});
  } catch (const unisono::Error& error) {
    std::printf("%s\n", error.what());
    comm.reset();
    return 0;
  }
  return 1;
}
"""


# Ranks gather different lengths, and say so before one of them ends the run.
DIFFERS = r"""
#include <cstdio>
#include <vector>
#include "unisono/mpi.hpp"
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    unisono::Communicator comm = unisono::mpi::communicator(MPI_COMM_WORLD, {.check = false});
    const std::vector<float> x(static_cast<std::size_t>(10 * (1 + comm.rank())));
    std::vector<float> y(x.size() * static_cast<std::size_t>(comm.size()));
    comm.all_gather({.in = x.data(), .out = y.data(), .count = x.size()});
  } catch (const unisono::MismatchError& error) {
    std::printf("%s\n", error.what());
    std::fflush(stdout);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Abort(MPI_COMM_WORLD, 3);
}
"""


# Rank 0 takes a short and a long message of every other rank as they come, and answers. One thread calls MPI.
TAGGED = r"""
#include <cstdio>
#include <vector>
#include "unisono/mpi.hpp"
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  {
    unisono::Communicator comm = unisono::mpi::communicator(MPI_COMM_WORLD, {.timeout_s = 30});
    std::vector<float> x(500000, static_cast<float>(comm.rank())), y(x.size());
    const unisono::Call all{.in = x.data(), .out = y.data(), .count = x.size()};
    const unisono::Call one{.in = x.data(), .out = y.data(), .count = 1};
    int right = 0;
    if (comm.rank() == 0) {
      for (int i = 1; i < comm.size(); ++i) {
        const unisono::Received got = comm.recv(all, unisono::Communicator::kAnySource, 1 << 30);
        right += y.back() == static_cast<float>(got.source) && got.bytes == 4 * x.size();
        right += comm.recv(one, got.source, 4).bytes == 4;
        comm.send(one, got.source, 5);
      }
    } else {
      comm.send(one, 0, 4);
      comm.send(all, 0, 1 << 30);
      right = comm.recv(one, 0, 5).source == 0 && y.front() == 0;
    }
    std::printf("rank %d: %d\n", comm.rank(), right);
  }
  MPI_Finalize();
}
"""


@pytest.fixture(scope="module", params=["beside_python", "openmpi", "impi"])
def mpi(request: pytest.FixtureRequest) -> mpi_programs.Mpi:
    return getattr(mpi_programs, request.param)()


@pytest.fixture(scope="module")
def example(mpi: mpi_programs.Mpi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = mpi_programs.ROOT / "examples" / "07_nodes.cpp"
    return mpi.build(source, tmp_path_factory.mktemp("nodes") / "nodes")


def build(mpi: mpi_programs.Mpi, code: str, folder: Path) -> Path:
    source = folder / "program.cpp"
    source.write_text(code)
    return mpi.build(source, folder / "program")


def assert_right(ended: ranks.Ended, nodes: list[int]) -> None:
    """Checks the output of the ranks. `nodes`: the number of each rank's node."""
    assert ended.code == 0, str(ended)
    size, count = len(nodes), max(nodes) + 1
    between = ", by MPI between nodes" if count > 1 else ""
    assert sorted(ended.output.splitlines()) == [
        f"rank {rank} of {size}, node {node} of {count}: the sum is right{between}"
        for rank, node in enumerate(nodes)
    ]


@pytest.mark.parametrize("layout", ["a", "aaa", "ab", "aabb", "abab", "abc"])
def test_the_example_on_virtual_nodes(mpi: mpi_programs.Mpi, example: Path, layout: str) -> None:
    assert_right(mpi.run(layout, [example]), ["abc".index(letter) for letter in layout])


@pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or "")
def test_the_example_on_hosts(tmp_path: Path) -> None:
    source = mpi_programs.ROOT / "examples" / "07_nodes.cpp"
    program = mpi_programs.beside_python().build(source, tmp_path / "nodes")
    with hosts.hosts(2) as made:
        assert_right(made.mpiexec(2, [str(program)]), [0, 0, 1, 1])


def test_mpi_that_is_not_running(mpi: mpi_programs.Mpi, tmp_path: Path) -> None:
    program = build(mpi, ENDED, tmp_path)
    before = mpi.run("ab", [program])
    assert before.code == 0, str(before)
    assert before.output.count("MPI is not running: call MPI_Init before unisono::mpi::communicator") == 2
    after = mpi.run("ab", [program, "end"])
    assert after.code == 0, str(after)
    assert after.output.count("MPI has been finalized, but a communicator over it is in use: close") == 2


def test_messages_with_tags(mpi: mpi_programs.Mpi, tmp_path: Path) -> None:
    ended = mpi.run("abb", [build(mpi, TAGGED, tmp_path)])
    assert ended.code == 0, str(ended)
    assert sorted(ended.output.splitlines()) == ["rank 0: 4", "rank 1: 1", "rank 2: 1"]


def test_calls_that_differ(mpi: mpi_programs.Mpi, tmp_path: Path) -> None:
    ended = mpi.run("abc", [build(mpi, DIFFERS, tmp_path)])
    assert ended.code == 3, str(ended)
    assert ended.output.count("bytes: make the same call on every rank (UNISONO_CHECK=1 compares them)") == 3
