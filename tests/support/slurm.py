"""A Slurm cluster whose nodes are the hosts of hosts.py, with the controller on the first. Requires Debian's
slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import hosts
import ranks

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_CONFIGURATION = """
ClusterName=unisono
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES
"""


def missing() -> str | None:
    """Returns why there can be no cluster here, or None."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"there is no {lacking[0]}: install slurmctld, slurmd, slurm-client and munge"
    return hosts.missing()


class Cluster:
    """A Slurm cluster. folder: for the files of the daemons."""

    def __init__(self, made: hosts.Hosts, folder: Path) -> None:
        self._hosts, self._folder = made, folder
        self._env = {"UNISONO_TEST_HOSTS": made.prefix, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self, daemons: ExitStack, each: int) -> None:
        """Starts the daemons, for nodes with `each` cores, and waits until all nodes are idle."""
        folder, numbers = self._folder, self._hosts.numbers
        names = [f"{self._hosts.address(number)} node{number}" for number in numbers]
        (folder / "hosts").write_text("\n".join([*names, "127.0.0.1 localhost\n"]))
        nodes = [
            f"NodeName=node{number} NodeAddr={self._hosts.address(number)} CPUs={each} State=UNKNOWN\n"
            for number in numbers
        ]
        (folder / "slurm.conf").write_text("".join([_CONFIGURATION.format(folder=folder), *nodes]))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for name in ("state", *(f"node{number}" for number in numbers)):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
        munged += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        everywhere = [self._on(number, ["slurmd", "-D"]) for number in numbers]
        for argv in (munged, self._on(1, ["slurmctld", "-D", "-c"]), *everywhere):
            quiet = subprocess.DEVNULL
            daemon = subprocess.Popen(argv, env={**os.environ, **self._env}, stdout=quiet, stderr=quiet)
            daemons.callback(daemon.wait)
            daemons.callback(daemon.kill)
        deadline = time.monotonic() + 60
        idle = self._on(1, ["sinfo", "--noheader", "--states=idle", "--format=%D"])
        while True:
            ended = ranks.run(idle, self._env, 10)
            if ended.output.strip() == str(len(numbers)):
                return
            if time.monotonic() > deadline:
                raise OSError(f"the nodes do not come up: {ended}")
            time.sleep(0.2)

    def _on(self, number: int, argv: Sequence[str]) -> list[str]:
        known = shlex.quote(str(self._folder / "hosts"))
        names = f"mount --bind {known} /etc/hosts && hostname node{number} &&"
        return [hosts.ENTER, self._hosts.address(number), names, *map(shlex.quote, argv)]

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> ranks.Ended:
        """Runs a command on the first host."""
        return ranks.run(self._on(1, argv), {**self._env, **(env or {})}, 90)

    def batch(self, script: Path, each: int, argv: Sequence[str]) -> ranks.Ended:
        """Runs `argv`, with this Python first, by a batch script on all nodes, to its end."""
        log = self._folder / "job.txt"
        command = ["sbatch", "--wait", f"--nodes={len(self._hosts.numbers)}", f"--output={log}"]
        if "torchrun" not in script.name:
            command.append(f"--ntasks-per-node={each}")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ended = self.run([*command, str(script), *argv[1:]], {"PATH": path})
        job_output = log.read_text() if log.exists() else ""
        return replace(ended, output=f"{ended.output}{job_output}")


@contextmanager
def cluster(count: int, each: int, folder: Path) -> Iterator[Cluster]:
    with hosts.hosts(count) as made, ExitStack() as daemons:
        one = Cluster(made, folder)
        one.start(daemons, each)
        yield one
