"""Under Open MPI and Intel MPI, on virtual nodes: collectives, ranks that fail, and MPI's own end.

Other tests run under the MPI beside this Python; C++ programs under all three are in test_nodes_cpp.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpi_programs
import ranks
from unisono.bench.mpis import mpiexec_command

pytestmark = pytest.mark.mpi
MAKE = "import unisono; unisono.init(timeout_s=10)"


@pytest.fixture(scope="module", params=["openmpi", "impi"])
def mpi(request: pytest.FixtureRequest) -> mpi_programs.Mpi:
    return getattr(mpi_programs, request.param)()


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """Fails a test whose ranks leave a file in shared memory."""
    marker = ranks.new_marker()["UNISONO_TEST"]
    yield
    left = ranks.left_in_shared_memory(marker)
    # libfabric's are of a rank that a test beside this one has killed: the next rank over it removes them
    assert {name for name in left if not name.startswith("unisono-shm-")} == set()


@pytest.mark.parametrize(("layout", "step"), [("ab", 16), ("aabb", 6), ("abab", 6), ("abb", 6)])
def test_collectives(mpi: mpi_programs.Mpi, layout: str, step: int) -> None:
    for said in mpi.play(layout, "node_programs:sample", step).results():
        assert (said["transport"], said["words"]) == ("MPI", {})
        assert said["calls"] >= 100


@pytest.mark.parametrize("layout", ["abc", "aabb"])
def test_sums_of_several_blocks(mpi: mpi_programs.Mpi, layout: str) -> None:
    assert mpi.play(layout, "node_sum_programs:long_sums", layout).results() == [[]] * len(layout)


def test_quantised_sums(mpi: mpi_programs.Mpi) -> None:
    assert mpi.play("aabb", "node_sum_programs:quantised_sums", "aabb").results() == [[]] * 4


@pytest.mark.parametrize("program", ["messages", "large"])
def test_messages_with_tags(mpi: mpi_programs.Mpi, program: str) -> None:
    assert mpi.play("abb", f"message_programs:{program}").results() == [[]] * 3


def test_what_is_refused(mpi: mpi_programs.Mpi) -> None:
    assert mpi.play("aab", "node_programs:refusals").results() == [{}] * 3


@pytest.mark.usefixtures("nothing_stays")
def test_lengths_that_differ(mpi: mpi_programs.Mpi, tmp_path: Path) -> None:
    outcome = mpi.play("abc", "node_programs:other_lengths", str(tmp_path / "flag"), "abc")
    expected = [
        f"where rank {rank} (node {rank}) expects {40 * (1 + rank)} bytes: make the same" for rank in range(3)
    ]
    for said in outcome.results():
        assert said["error"]["type"] == "MismatchError", said
        assert any(one in said["error"]["text"] for one in expected), said


@pytest.mark.usefixtures("nothing_stays")
def test_a_node_that_is_late(mpi: mpi_programs.Mpi, tmp_path: Path) -> None:
    *waited, _ = mpi.play("abc", "node_programs:one_is_late", str(tmp_path / "flag"), "abc").results()
    for said in waited:
        assert said["error"]["type"] == "TimeoutError", said
        pattern = r"rank (0 \(node 0|1 \(node 1)\) has waited 2 s for rank 2 \(node 2\) over MPI: see"
        assert re.match(pattern, said["error"]["text"]), said


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("count", [8, 3_000_000])
def test_a_rank_that_dies(mpi: mpi_programs.Mpi, count: int) -> None:
    """The launcher ends the others. Those that it leaves the time say who has died."""
    outcome = mpi.play("aabb", "node_programs:dies", 3, count)
    assert outcome.ended.code not in (0, None), str(outcome.ended)
    assert outcome.ranks[3] is None
    for said in outcome.ranks[:3]:
        assert said is None or "rank 3" in said["error"]["text"], said


def test_mpi_that_ends_first(mpi: mpi_programs.Mpi) -> None:
    outcome = mpi.play("aabb", "node_programs:mpi_ends_first")
    assert outcome.ended.code == 0, str(outcome.ended)
    for said in outcome.results():
        for one in (said["first"], said["second"]):
            assert one["type"] == "ResourceError", said
            assert "MPI has been finalized, but a communicator over it is in use: close" in one["text"]
        assert said["sum"] == 4 and said["closed"]


def test_communicators_that_close(mpi: mpi_programs.Mpi) -> None:
    outcome = mpi.play("aabb", "node_programs:closes")
    assert outcome.ended.code == 0, str(outcome.ended)
    assert outcome.results() == [[2, 4, 2, 2] * 3] * 4


def test_a_forked_child(mpi: mpi_programs.Mpi) -> None:
    parent, other = mpi.play("ab", "fault_programs:forked").results()
    assert "this process was forked from a rank" in parent["child"]["call"]["error"]["text"]
    assert (parent["sum"], other["sum"]) == (8, 8)


def test_a_launcher_of_another_mpi() -> None:
    """Open MPI's with MPICH, which would abort, and MPICH's with Open MPI, which would start alone."""
    openmpi, mpich = mpi_programs.openmpi(), mpi_programs.beside_python()
    for launcher, library in ((openmpi.mpiexec, {}), (mpich.mpiexec, openmpi.env)):
        ended = ranks.run([*mpiexec_command(launcher, 2), sys.executable, "-c", MAKE], library)
        assert ended.code != 0, str(ended)
        assert "is not the launcher's: it " in ended.output, str(ended)
        assert "2 separate copies" in ended.output and "set MPI4PY_LIBMPI to the" in ended.output, str(ended)


def test_times_beside_the_mpi(mpi: mpi_programs.Mpi, tmp_path: Path) -> None:
    source, program = mpi_programs.ROOT / "tools" / "beside_mpi.c", tmp_path / "beside_mpi"
    wrapper = Path(mpi.find_mpicxx()).with_name("mpicc")
    folder = mpi_programs.LIBRARY.parent
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{mpi_programs.ROOT / 'include'}", f"-L{folder}"]
    words = [str(wrapper), *flags, f"-Wl,-rpath,{folder}", str(source), "-o", str(program), "-lunisono"]
    built = ranks.run(words, mpi.env)
    assert built.code == 0, str(built)
    for collective in ("all_reduce", "reduce_scatter", "message"):
        ended = mpi.run("aa", [program, collective, "3", "4"])
        assert ended.code == 0, str(ended)
        rows = [json.loads(line) for line in ended.output.splitlines()]
        assert [(row["collective"], row["bytes"]) for row in rows] == [(collective, 8), (collective, 16)]
        for row in rows:
            assert row["unisono"] > 0
            assert row["mpi"] > 0
            assert row["barrier"] == sorted(row["barrier"])
    assert mpi.run("aa", [program, "nonsense", "3", "4"]).code != 0
