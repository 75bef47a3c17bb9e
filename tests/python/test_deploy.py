"""The files of deploy/: they parse, and the commands in them run here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ranks
from unisono.bench.mpis import find_mpiexec, mpiexec_command

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "deploy" / "slurm").glob("*.sbatch"))


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / name).read_text()))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_batch_script(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    refused = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "give the program" in refused.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_batch_script_gives_srun_the_cores(script: Path, tmp_path: Path) -> None:
    for name, does in (("srun", 'echo "$@"'), ("scontrol", "echo node1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "1"}
    env = {**os.environ, **slurm, "SLURM_CPUS_PER_TASK": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", script, "train.py"], capture_output=True, text=True, env=env, check=True)
    assert " --cpus-per-task=7 " in f" {ran.stdout}"


@pytest.mark.mpi
def test_the_mpi_job(tmp_path: Path) -> None:
    (job,) = documents("mpijob.yaml")
    replicas = job["spec"]["mpiReplicaSpecs"]
    whole = replicas["Launcher"]["template"]["spec"]["containers"][0]["command"]
    wait, command = whole[: whole.index("mpiexec")], whole[whole.index("mpiexec") :]
    assert job["apiVersion"] == "kubeflow.org/v2beta1" and job["spec"]["mpiImplementation"] == "MPICH"
    n = replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    assert command[:4] == ["mpiexec", "-n", str(n), "python3"]
    here = [*mpiexec_command(str(find_mpiexec()), n), sys.executable, str(ROOT / command[4]), *command[5:]]
    hosts = tmp_path / "hostfile"
    wait = [word.replace("/etc/mpi/hostfile", str(hosts)) for word in wait]
    hosts.write_text("localhost:2\nno-such-host.invalid:2\n")
    assert ranks.run([*wait, "true"], timeout_s=3).code is None
    hosts.write_text("localhost:2\n")
    ended = ranks.run([*wait, *here])
    assert ended.code == 0, str(ended)


@pytest.mark.torch
def test_the_job_of_torchrun() -> None:
    """Both pods' commands, on two virtual nodes of this machine."""
    service, job = documents("torchrun.yaml")
    pod = job["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    name, subdomain = job["metadata"]["name"], pod["subdomain"]
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == subdomain
    assert f"--master-addr={name}-0.{subdomain}" in command
    assert f"--nnodes={job['spec']['completions']}" in command
    changes = {
        f"--master-addr={name}-0.{subdomain}": "--master-addr=127.0.0.1",
        "--master-port=29500": f"--master-port={ranks.free_port()}",
    }
    assert set(changes) < set(command)
    here = [sys.executable, "-m", "torch.distributed.run"]
    here += [changes.get(word, word) for word in command[1:-1]] + [str(ROOT / command[-1])]
    pods = [
        subprocess.Popen(
            [word.replace("$(NODE)", str(node)) for word in here],
            env={**os.environ, "UNISONO_NODE": f"pod {node}"},
        )
        for node in range(2)
    ]
    try:
        assert [one.wait(100) for one in pods] == [0, 0]
    finally:
        for one in pods:
            one.kill()
            one.wait()
