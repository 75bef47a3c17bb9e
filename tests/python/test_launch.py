"""launch.from_env as a table."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import launch
from unisono.errors import UsageError
from unisono.launch import World

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1"}
UNISONO = {"UNISONO_RANK": "1", "UNISONO_SIZE": "2"}
ALONE = World(0, 1, 0, 1, "none")


@pytest.mark.parametrize(
    ("env", "world"),
    [
        ({}, ALONE),
        ({"PATH": "/bin", "RANK": "", "WORLD_SIZE": " "}, ALONE),
        (UNISONO, World(1, 2, 1, 2, "unisono")),
        (TORCHRUN, World(3, 4, 1, 2, "torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "4"}, World(1, 4, 1, 4, "torchrun")),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, World(3, 4, 1, 4, "torchrun")),
        (OPENMPI, World(5, 8, 1, 4, "openmpi")),
        (PMI, World(2, 3, 0, 1, "mpich")),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, World(2, 3, 2, 3, "mpich")),
        ({"PMIX_RANK": "2", "PMI_SIZE": "3"}, World(2, 3, 2, 3, "mpich")),
        (STEP, World(5, 6, 1, 6, "slurm")),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "7"}, World(5, 7, 1, 7, "slurm")),
        ({**STEP, "PMIX_RANK": "5"}, World(5, 6, 1, 6, "slurm")),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_NODEID": "2"}, World(5, 6, 1, 2, "slurm")),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_NODEID": "1"}, World(5, 6, 1, 2, "slurm")),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "nonsense"}, World(5, 6, 1, 6, "slurm")),
        # an salloc shell, a batch script and an interactive step are no steps of the user
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0"}, ALONE),
        ({**STEP, "SLURM_STEP_ID": "4294967291"}, ALONE),
        ({**STEP, "SLURM_STEP_ID": "4294967290"}, ALONE),
        # one launcher inside another: the inner one counts
        ({**UNISONO, **TORCHRUN, **OPENMPI}, World(1, 2, 1, 2, "unisono")),
        ({**TORCHRUN, **OPENMPI, **STEP}, World(3, 4, 1, 2, "torchrun")),
        ({**OPENMPI, **PMI, **STEP}, World(5, 8, 1, 4, "openmpi")),
        ({**PMI, **STEP}, World(2, 3, 0, 1, "mpich")),
        # a container platform's RANK is the pod's, not the process's
        ({"RANK": "0", "WORLD_SIZE": "2", **OPENMPI}, World(5, 8, 1, 4, "openmpi")),
        ({"RANK": "0", **PMI}, World(2, 3, 0, 1, "mpich")),
    ],
)
def test_from_env(env: dict[str, str], world: World) -> None:
    assert launch.from_env(env) == world


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"UNISONO_RANK": "0"}, ["UNISONO_RANK", "UNISONO_SIZE is not", "unisono run"]),
        ({"UNISONO_SIZE": "2"}, ["UNISONO_SIZE", "UNISONO_RANK is not"]),
        ({"UNISONO_RANK": "2", "UNISONO_SIZE": "2"}, ["UNISONO_RANK=2", "UNISONO_SIZE=2"]),
        ({"RANK": "1"}, ["RANK is set", "WORLD_SIZE is not", "torchrun", "unset RANK"]),
        ({"WORLD_SIZE": "1"}, ["WORLD_SIZE is set", "RANK is not"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'", "whole number"]),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, ["WORLD_SIZE='four'"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({**TORCHRUN, "LOCAL_RANK": "9", "LOCAL_WORLD_SIZE": ""}, ["LOCAL_RANK=9", "WORLD_SIZE=4"]),
        ({**TORCHRUN, "RANK": "9" * 9000}, ["RANK=", "whole number"]),
        ({**TORCHRUN, "RANK": "٣"}, ["RANK=", "whole number"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE is not", "mpirun"]),
        ({"PMI_RANK": "3", "PMI_SIZE": "3"}, ["PMI_RANK=3", "PMI_SIZE=3", "mpiexec"]),
        ({"PMIX_RANK": "0"}, ["PMIX_RANK", "bootstrap=MPI.COMM_WORLD"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, ["SLURM_NTASKS is not", "srun"]),
        ({"SLURM_STEP_ID": "x", "SLURM_PROCID": "0"}, ["SLURM_STEP_ID='x'"]),
    ],
)
def test_from_env_names_the_bad_variable(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        launch.from_env(env)
    assert all(word in str(caught.value) for word in words), caught.value
    assert len(str(caught.value)) < 400


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(
            [*UNISONO, *TORCHRUN, *OPENMPI, *PMI, *STEP, "PMIX_RANK", "SLURM_STEP_TASKS_PER_NODE"]
        ),
        st.integers(-1, 9).map(str) | st.text(max_size=6) | st.sampled_from(["2(x3)", "0(x0)", "1,2"]),
    )
)
def test_from_env_gives_a_valid_world_or_a_usage_error(env: dict[str, str]) -> None:
    before = dict(env)
    with contextlib.suppress(UsageError):
        world = launch.from_env(env)
        assert 0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size
    assert env == before


def test_world_checks_itself() -> None:
    with pytest.raises(UsageError, match="rank is 2 and size is 2"):
        World(2, 2, 0, 1, "explicit")
    with pytest.raises(UsageError, match="local_rank is -1"):
        World(0, 2, -1, 1, "explicit")
