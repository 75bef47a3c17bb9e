"""Ranks that a real Slurm starts, on two hosts (support/slurm.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import ranks
import slurm

pytestmark = pytest.mark.skipif(slurm.missing() is not None, reason=slurm.missing() or "")
SCRIPTS = Path(__file__).resolve().parents[2] / "deploy" / "slurm"
EACH = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    with slurm.cluster(2, EACH, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.mark.parametrize(
    ("script", "transport"),
    [
        pytest.param("mpi.sbatch", "MPI", marks=pytest.mark.mpi),
        pytest.param("torchrun.sbatch", "gloo", marks=pytest.mark.torch),
    ],
)
def test_a_batch_job(cluster: slurm.Cluster, script: str, transport: str) -> None:
    def start(argv: Sequence[str]) -> ranks.Ended:
        return cluster.batch(SCRIPTS / script, EACH, argv)

    outcome = ranks.play_by(start, 2 * EACH, "node_programs:sample", 48, within_s=10)
    for answer in outcome.results():
        assert (answer["nodes"], answer["transport"], answer["words"]) == ([[0, 1], [2, 3]], transport, {})
        assert answer["calls"] > 0


def test_a_step_without_mpi_names_what_it_needs(cluster: slurm.Cluster) -> None:
    program = "import unisono; unisono.init()"
    ended = cluster.run(["srun", "--nodes=2", "--ntasks=2", "--mpi=none", sys.executable, "-c", program])
    assert ended.code != 0 and "srun --mpi=pmi2" in ended.output, str(ended)


def test_a_step_of_one_rank(cluster: slurm.Cluster) -> None:
    program = "import unisono; print(unisono.init())"
    ended = cluster.run(["srun", "--nodes=1", "--ntasks=1", "--mpi=none", sys.executable, "-c", program])
    assert (ended.code, ended.output) == (0, "<Communicator: rank 0 of 1>\n"), str(ended)
