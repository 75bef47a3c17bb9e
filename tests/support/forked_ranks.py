"""The ranks of `ranks.play`: `python forked_ranks.py N NODES MODULE:FUNCTION FOLDER ARGS` runs rank_main.py's
`main` as `N` ranks, as `unisono run` does.

This process imports the module, then becomes all ranks by fork, since each rank would else take a fifth of a
second to import numpy and unisono, and two to import torch. The launcher's own code starts and ends them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import rank_main
from unisono.launch import FD_VARIABLE, rank, run_local

_MOST_BYTES = 1 << 20  # of an environment


class Forked:
    """A rank that waits for its start. Stands for the launcher's subprocess.Popen."""

    waiting: ClassVar[list[Forked]] = []

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            for other in (self, *Forked.waiting):
                other._socket.close()
            self._wait_for_start(theirs)
        theirs.close()

    @staticmethod
    def start(
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None,
        pass_fds: Sequence[int],
        process_group: int,
    ) -> Forked:
        """Does what Popen does with these arguments."""
        rank = Forked.waiting.pop(0)
        os.setpgid(rank.pid, process_group)
        message = json.dumps([dict(env), stdin == subprocess.DEVNULL]).encode()
        socket.send_fds(rank._socket, [message], list(pass_fds))
        rank._socket.close()
        return rank

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    @staticmethod
    def _wait_for_start(theirs: socket.socket) -> None:
        """Raises Started, in the new process, once the launcher has started this rank."""
        message, fds, _, _ = socket.recv_fds(theirs, _MOST_BYTES, 1)
        theirs.close()
        if not message:  # the launcher has ended
            os._exit(1)
        env, without_input = json.loads(message)
        os.environ.clear()
        os.environ.update({**env, FD_VARIABLE: str(fds[0])})
        os.set_inheritable(fds[0], True)
        if without_input:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
        raise Started


class Started(BaseException):
    """Leaves the launcher's part of this file, so that a rank ends as a program of its own does."""


def own_addresses() -> list[Any]:
    """Returns memory to keep: what this rank allocates from now on has not its siblings' addresses."""
    pages = random.SystemRandom().randrange(1, 1 << 16)
    return [mmap.mmap(-1, pages * mmap.PAGESIZE), bytearray(16 * (pages % 4096 + 1))]


def launch(n: int, nodes: int, argv: list[str]) -> int:
    with contextlib.suppress(Exception):  # each rank will say what is wrong
        importlib.import_module(argv[0].partition(":")[0])
    for _ in range(n):
        Forked.waiting.append(Forked())
    rank.subprocess = SimpleNamespace(Popen=Forked.start, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    return run_local(n, ["rank_main.py", *argv], nodes=nodes)


def main(n: str, nodes: str, *argv: str) -> int:
    try:
        return launch(int(n), int(nodes), list(argv))
    except Started:
        pass
    kept = own_addresses()  # noqa: F841
    sys.argv[1:3] = []
    return rank_main.main(*argv)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
