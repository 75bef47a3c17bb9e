"""`unisono run`: starts the ranks of a run as processes of this machine, and ends them all.

The launcher is also the hub through which the ranks meet (bootstrap/hub.py). Each rank inherits one end of a
socket pair, so that there is no server, no port and no file. The launcher sleeps in one selector over the
sockets, the ranks' pidfds and its signals, and so takes no time from the ranks.

Each rank leads a process group of its own. A signal, from the terminal or from `kill`, therefore reaches a
rank once, through the launcher. At the end the launcher kills the whole group, with every child of the rank.
Ranks are reaped last, so that no other process can get the group's number before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from ..bootstrap.hub import HEADER_BYTES, MAX_PAYLOAD, Hub
from ..clock import LOOK_S, Clock
from ..errors import ResourceError, UsageError
from .detect import FD_VARIABLE, NODE_VARIABLE, RANK_VARIABLE, SIZE_VARIABLE
from .rank import PIECE, Rank
from .signals import signals_to, stop_with

__all__ = ["outside_launchers", "run_command", "run_local"]

MAX_RANKS = 1024
_PIECES = (MAX_PAYLOAD + HEADER_BYTES) // PIECE + 2  # enough for one whole message
_CLOSED_S = 2.0  # from a rank's closed socket to its end; long, for a busy machine
# Variables by which a launcher describes this process. They are wrong for the ranks that it starts, and make
# an mpiexec fail. All other OMPI_MCA_*, OMPI_ALLOW_* and HYDRA_* are the user's settings.
_FOREIGN = re.compile(
    r"PMI|PRTE_|HYDI_|MPI_LOCAL|HYDRA_(HOST_FILE|RMK)$|OMPI_(?!MCA_|ALLOW_)|OMPI_MCA_(orte|ess|pmix)(_|$)"
    rf"|(LOCAL_)?(RANK|WORLD_SIZE)$|({RANK_VARIABLE}|{SIZE_VARIABLE}|{FD_VARIABLE})$"
)


def run_command(n: int, argv: Sequence[str], *, nodes: int = 1) -> int:
    """Runs `unisono run -n N ARGV...`. See `run_local`. Returns the exit code for the shell.

    A program that ends in .py, and `-m module`, run under this Python.
    """
    if not argv:
        raise UsageError("there is nothing to run: give a program, as in `unisono run -n 4 train.py`")
    if argv[0] == "-m" and len(argv) == 1:
        raise UsageError("-m needs the name of a module, as in `unisono run -n 4 -m package.train`")
    python = [sys.executable] if argv[0].endswith(".py") or argv[0] == "-m" else []
    return run_local(n, [*python, *argv], nodes=nodes)


def run_local(
    n: int,
    argv: Sequence[str],
    *,
    nodes: int = 1,
    env: Mapping[str, str] | None = None,
    grace_s: float = 10.0,
    kill_s: float = 5.0,
) -> int:
    """Runs `argv` as `n` ranks on this machine and waits for all of them.

    Rank 0 gets standard input unless that is a terminal. The ranks inherit standard output and error. When a
    rank fails, one line on stderr names the rank. The others get SIGTERM after `grace_s`, and SIGKILL after
    `kill_s` more. SIGINT, SIGTERM, SIGHUP and Ctrl-Z are passed on to the ranks (if the caller is the main
    thread). After one SIGINT the ranks have any time to save their work; a second SIGINT means SIGTERM.

    Args:
        n: number of ranks, 1 to 1024.
        argv: program and arguments; no shell.
        nodes: number of virtual nodes (UNISONO_NODE), among which the ranks are divided equally.
        env: environment of the ranks, default this process's; rank variables of other launchers are left out.
        grace_s, kill_s: seconds, see above.

    Returns:
        0 if every rank returned 0, else the exit code of the rank that failed first: 128 + signal if a signal
        killed the rank.

    Raises:
        UsageError: n is out of range, or the program cannot be started.
        ResourceError: the machine has no room for so many processes or sockets.
    """
    if not 1 <= n <= MAX_RANKS:
        raise UsageError(f"the number of ranks is {n}: give 1 to {MAX_RANKS}")
    if not 1 <= nodes <= n:
        raise UsageError(f"{n} ranks cannot be on {nodes} nodes: give from 1 node to one for each rank")
    if not argv:
        raise UsageError("there is nothing to run: argv is empty")
    run = _Run(n, nodes, grace_s, kill_s)
    with signals_to(run.hand_over), run:  # in this order: a signal must not interrupt the clearing up
        run.start(list(argv), dict(os.environ if env is None else env))
        return run.wait()


def outside_launchers(env: Mapping[str, str], *, batch_system: bool = True) -> dict[str, str]:
    """Returns the environment without the variables of a launcher around this process.

    Args:
        batch_system: whether Slurm's variables stay. An mpiexec would look for other hosts by them.
    """
    return {
        name: value
        for name, value in env.items()
        if not _FOREIGN.match(name) and (batch_system or not name.startswith("SLURM_"))
    }


class _Run:
    """The launcher's state; a context manager that leaves no process behind."""

    def __init__(self, size: int, nodes: int, grace_s: float, kill_s: float) -> None:
        self.received: deque[int] = deque()  # signals, from the handler to the loop
        self.wake_reader, self.wake_writer = socket.socketpair()
        self._clock = Clock()
        self._hub = Hub(size, self._clock)
        self._size, self._nodes = size, nodes
        self._grace_s = grace_s
        self._kill_s = kill_s
        self._ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        self._failed: Rank | None = None
        self._closed: dict[Rank, float] = {}  # ranks at the end of their stream, and when they count as lost
        self._interrupts = 0
        self._stopping = False  # by a signal to the launcher
        self._next: tuple[float, int] | None = None  # when to send which signal to all

    def __enter__(self) -> _Run:
        for end in (self.wake_reader, self.wake_writer):
            end.setblocking(False)
        self._selector.register(self.wake_reader, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.close()
        self._selector.close()
        self.wake_reader.close()
        self.wake_writer.close()

    def hand_over(self, number: int) -> None:
        """Hands a signal to the loop, from the signal's handler."""
        self.received.append(number)
        with contextlib.suppress(OSError):
            self.wake_writer.send(b"\0")

    def start(self, argv: list[str], env: dict[str, str]) -> None:
        kept = {**outside_launchers(env), SIZE_VARIABLE: str(self._size)}
        for number in range(self._size):
            if self._nodes > 1:
                kept[NODE_VARIABLE] = str(number * self._nodes // self._size)
            try:
                rank = Rank(number, argv, kept)
            except OSError as error:
                if error.filename is not None:  # the new process could not become the program
                    why = _reason(error, argv[0], kept)
                    raise UsageError(f"cannot start {argv[0]!r}: {why}; check the program's name") from error
                text = f"cannot start rank {number} of {self._size}: {error.strerror}; start fewer ranks"
                raise ResourceError(error.errno, text) from error
            except ValueError as error:
                raise UsageError(f"cannot start {argv[0]!r}: {error}") from error
            self._ranks.append(rank)
            self._selector.register(rank.socket, selectors.EVENT_READ, rank)
            if rank.pidfd >= 0:
                self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)

    def wait(self) -> int:
        """Serves the ranks until the last one has ended. Returns the exit code of the run."""
        while any(rank.status is None for rank in self._ranks):
            for key, mask in self._selector.select(self._timeout()):
                if key.fileobj is self.wake_reader:
                    self._handle_signals()
                elif isinstance(key.data, Rank) and key.fileobj is key.data.socket:
                    self._serve(key.data, mask)
            self._look()
            self._hub.expire()
            self._escalate()
            for rank in self._ranks:
                self._flush(rank)
        status = 0 if self._failed is None else self._failed.status or 0
        return status if status >= 0 else 128 - status

    def _timeout(self) -> float | None:
        closed = [moment for rank, moment in self._closed.items() if self._hub.listening(rank.number)]
        known = (self._hub.deadline, self._next and self._next[0], *closed)
        times = [moment for moment in known if moment is not None]
        if not times and all(rank.pidfd >= 0 for rank in self._ranks):
            return None
        return min([LOOK_S, *(max(0.0, moment - self._clock()) for moment in times)])

    def _serve(self, rank: Rank, mask: int) -> None:
        if not mask & selectors.EVENT_READ or not self._hub.listening(rank.number):
            return
        data = rank.receive()
        if data:
            self._hub.receive(rank.number, data)
        elif data is not None:
            self._closed[rank] = self._soon(_CLOSED_S)  # _look() says how the rank ended, if it ends soon

    def _look(self) -> None:
        """Notes the ranks that have ended since the last look, or closed their socket without ending."""
        ended = [rank for rank in self._ranks if rank.look()]
        for rank in ended:
            for _ in range(_PIECES):  # bytes sent before the end count
                data = rank.receive()
                if not data:
                    break
                self._hub.receive(rank.number, data)
            self._hub.lost(rank.number, rank.what_happened)
            if rank.pidfd >= 0:
                self._selector.unregister(rank.pidfd)  # it stays readable
        for rank, moment in self._closed.items():
            if self._clock() >= moment:
                self._hub.lost(rank.number, "closed its connection to the launcher")
        failed = [rank for rank in ended if rank.status]
        if failed and self._failed is None:  # among several, a killed rank is the likelier cause
            self._failed = min(failed, key=lambda rank: ((rank.status or 0) > 0, rank.number))
            self._report(self._failed)

    def _report(self, failed: Rank) -> None:
        """Writes which rank failed, and starts the others' time to end."""
        if self._stopping:
            return  # the user knows, and decides
        others = sum(rank.status is None for rank in self._ranks)
        rest = f"; the {others} still running have {self._grace_s:g} s to end" if others else ""
        with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no stderr
            sys.stderr.write(f"unisono run: rank {failed.number} {failed.what_happened}{rest}\n")
            sys.stderr.flush()
        self._next = (self._soon(self._grace_s), signal.SIGTERM)

    def _handle_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.wake_reader.recv(PIECE):
                pass
        while self.received:
            number = self.received.popleft()
            if number == signal.SIGTSTP:
                stop_with(self._send)
                continue
            if number == signal.SIGINT:
                self._interrupts += 1
                number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[min(self._interrupts, 3) - 1]
            self._send(number)
            self._stopping = True
            self._next = None if number == signal.SIGINT else (self._soon(self._grace_s), signal.SIGKILL)

    def _escalate(self) -> None:
        if self._next is not None and self._clock() >= self._next[0]:
            number = self._next[1]
            self._send(number)
            self._next = (self._soon(self._kill_s), signal.SIGKILL) if number == signal.SIGTERM else None

    def _soon(self, seconds: float) -> float:
        return self._clock() + seconds

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.status is None:
                rank.signal(number)

    def _flush(self, rank: Rank) -> None:
        """Writes the hub's bytes for `rank`, and listens to the rank only while its bytes count."""
        outbox = self._hub.outbox[rank.number]
        if rank.status is not None:
            outbox.clear()
        if outbox:
            try:
                del outbox[: rank.socket.send(outbox)]
            except BlockingIOError:
                pass
            except OSError:
                outbox.clear()
        open_ = self._hub.listening(rank.number) and rank not in self._closed
        mask = selectors.EVENT_READ if open_ else 0
        mask |= selectors.EVENT_WRITE if outbox else 0
        known = self._selector.get_map().get(rank.socket)
        if known is None:
            return
        if known.events & ~mask & selectors.EVENT_READ:
            rank.stop_listening()
        if not mask:
            self._selector.unregister(rank.socket)
        elif known.events != mask:
            self._selector.modify(rank.socket, mask, rank)


def _reason(error: OSError, program: str, env: Mapping[str, str]) -> str | None:
    """Returns the system's reason, except for a program that is nowhere in PATH: a folder of PATH that may
    not be read makes the system give another reason.
    """
    found = os.sep in program or shutil.which(program, os.F_OK, env.get("PATH", os.defpath))
    return error.strerror if found else os.strerror(errno.ENOENT)
