"""Starts the ranks of a test as processes, and says how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("rank_main.py")
_LAUNCH = "import sys; from unisono.launch import run_local; sys.exit(run_local(int(sys.argv[1]), sys.argv[2:]))"


@dataclass(frozen=True)
class Ended:
    """Exit code of a launcher (None: it had to be killed), what it and the ranks printed, and seconds."""

    code: int | None
    output: str
    seconds: float

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.code is not None else "killed, for it did not end in time"
        return f"{how} after {self.seconds:.1f} s; it printed:\n{self.output[-4000:]}"


def run(argv: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 60) -> Ended:
    """Runs a program to its end, or kills it after `timeout_s`."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:  # not a pipe: that one would stay open as long as any child lives
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
    """SIGTERM lets a launcher end its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)


def launch(n: int, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 60) -> Ended:
    """`argv` as `n` ranks, as `unisono run` starts them."""
    return run([sys.executable, "-c", _LAUNCH, str(n), *argv], env, timeout_s)


@dataclass(frozen=True)
class Outcome:
    """What every rank of a program came to: its result, or its error as {"type", "text", ...}; None if it left no word."""

    ended: Ended
    ranks: list[Any]

    def errors(self) -> list[dict[str, Any]]:
        """The error of every rank; fails where a rank has none."""
        for rank, said in enumerate(self.ranks):
            assert isinstance(said, dict) and "error" in said, f"rank {rank} said {said}; {self.ended}"
        return [said["error"] for said in self.ranks]

    def results(self) -> list[Any]:
        """The result of every rank; fails where a rank has none."""
        for rank, said in enumerate(self.ranks):
            assert isinstance(said, dict) and "result" in said, f"rank {rank} said {said}; {self.ended}"
        return [said["result"] for said in self.ranks]


def play(
    n: int,
    program: str,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> Outcome:
    """Runs `module:function` as `n` ranks, each with the JSON-able `args`."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, str(PROGRAMS), program, folder, json.dumps(args)]
        ended = launch(n, argv, env, timeout_s)
        return Outcome(ended, [_said(Path(folder) / str(rank)) for rank in range(n)])


def _said(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def traces() -> set[str]:
    """What Unisono could leave behind on this machine: files in shared memory, and memory that a process still holds."""
    found = {str(path) for path in Path("/dev/shm").glob("*unisono*")}
    for process in _processes():
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if "memfd:unisono" in os.readlink(fd):
                        found.add(f"process {process.name}, {fd.name}")
    return found


def children_of(pid: int) -> set[int]:
    """Processes whose parent is `pid`, zombies too."""
    found = set()
    for process in _processes():
        with contextlib.suppress(OSError, ValueError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(process.name))
    return found


def _processes() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
