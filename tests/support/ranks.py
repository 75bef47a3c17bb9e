"""Starts the ranks of a test as processes, and returns how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.bench.mpis import find_mpiexec, mpiexec_command

PROGRAMS = Path(__file__).with_name("rank_main.py")
FORKED = Path(__file__).with_name("forked_ranks.py")
# Ranks are forked from a process that has imported their program, except where an import may begin CUDA.
_FORKS = not Path("/dev/nvidiactl").exists()
_LAUNCH = (
    "import sys; from unisono.launch import run_local; "
    "sys.exit(run_local(int(sys.argv[1]), sys.argv[3:], nodes=int(sys.argv[2])))"
)


@dataclass(frozen=True)
class Ended:
    """The exit code of a launcher (None: it was killed), the output of it and the ranks, and seconds."""

    code: int | None
    output: str
    seconds: float

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.code is not None else "killed, for it did not end in time"
        return f"{how} after {self.seconds:.1f} s; it printed:\n{self.output[-4000:]}"


def run(argv: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 60) -> Ended:
    """Runs a program to its end, or kills it after `timeout_s`."""
    began = time.monotonic()
    # not a pipe, which would stay open as long as any child lives
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            argv, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            code: int | None = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        output.seek(0)
        return Ended(code, output.read().decode(errors="replace"), time.monotonic() - began)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a launcher. SIGTERM lets it end its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)


def launch(
    n: int,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    nodes: int = 1,
    within: Sequence[str] = (),
) -> Ended:
    """Runs `argv` as `n` ranks, as `unisono run` does. within: a command that runs its remaining words."""
    return run([*within, sys.executable, "-c", _LAUNCH, str(n), str(nodes), *argv], env, timeout_s)


@dataclass(frozen=True)
class Outcome:
    """The outcome of every rank: {"result"}, or {"error"} as {"type", "text", ...}; None if it has none."""

    ended: Ended
    ranks: list[Any]

    def errors(self) -> list[dict[str, Any]]:
        """Returns the error of every rank. Fails if a rank has none."""
        for rank, one in enumerate(self.ranks):
            assert isinstance(one, dict) and "error" in one, f"rank {rank} left {one}; {self.ended}"
        return [one["error"] for one in self.ranks]

    def results(self) -> list[Any]:
        """Returns the result of every rank. Fails if a rank has none."""
        for rank, one in enumerate(self.ranks):
            assert isinstance(one, dict) and "result" in one, f"rank {rank} left {one}; {self.ended}"
        return [one["result"] for one in self.ranks]


def play(
    n: int,
    program: str,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    nodes: int = 1,
) -> Outcome:
    """Runs `module:function` as `n` ranks, each with the JSON-able `args`."""

    def start(argv: Sequence[str]) -> Ended:
        if not _FORKS:
            return launch(n, argv, env, timeout_s, nodes)
        return run([sys.executable, str(FORKED), str(n), str(nodes), *argv[2:]], env, timeout_s)

    return play_by(start, n, program, *args)


def play_by(
    start: Callable[[Sequence[str]], Ended], n: int, program: str, *args: object, within_s: float = 0
) -> Outcome:
    """Does the same with a launcher of the test, which runs an argv as `n` ranks. within_s: how long the
    ranks may outlive it."""
    with tempfile.TemporaryDirectory() as folder:
        ended = start([sys.executable, str(PROGRAMS), program, folder, json.dumps(args)])
        outcomes = [Path(folder) / str(rank) for rank in range(n)]
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and not all(path.exists() for path in outcomes):
            time.sleep(0.02)
        return Outcome(ended, [_outcome(path) for path in outcomes])


def play_mpi(n: int, program: str, *args: object) -> Outcome:
    """Runs `module:function` as `n` ranks under mpiexec."""

    def start(argv: Sequence[str]) -> Ended:
        return run([*mpiexec_command(str(find_mpiexec()), n), *argv], None, 120)

    return play_by(start, n, program, *args)


def _outcome(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def new_marker() -> dict[str, str]:
    """Returns an environment variable that marks the processes and files of one test."""
    marker = uuid.uuid4().hex
    _files_before[marker] = _files_in_shared_memory()
    return {"UNISONO_TEST": marker}


_files_before: dict[str, set[str]] = {}


def processes_with(marker: str) -> set[int]:
    """Returns the processes with that marker that still hold memory. Zombies are left out."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if marker.encode() in (process / "environ").read_bytes():
                    found.add(int(process.name))
    return found


def gone(marker: str, within_s: float) -> bool:
    """Returns whether the processes with that marker end in time."""
    deadline = time.monotonic() + within_s
    while processes_with(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for_state(pid: int, state: str) -> None:
    """Waits until a process is in a state of /proc/PID/stat. "T": stopped."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != state:
        time.sleep(0.001)  # bounded by the timeout of the test


def free_port() -> int:
    """Returns a TCP port of the loopback that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def left_in_shared_memory(marker: str, within_s: float = 10) -> set[str]:
    """Returns files of Unisono and Open MPI in shared memory that came since `new_marker` and stay, though no
    process has mapped them: those of tests beside this one are in use. Files of other programs vanish in
    time, except MPICH 5.0's, which only MPI_Finalize removes.
    """
    deadline = time.monotonic() + within_s
    left = _files_in_shared_memory() - _files_before[marker]
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= _files_in_shared_memory()
    return left - _mapped_files() if left else left


def _mapped_files() -> set[str]:
    """Returns the names of files in shared memory that any process has mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended
            found |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return found


def _files_in_shared_memory() -> set[str]:
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if "unisono" in name or name.startswith("sm_segment.")}
