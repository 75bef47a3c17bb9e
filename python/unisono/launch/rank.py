"""A rank as the launcher sees it: one process, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess

from .detect import FD_VARIABLE, RANK_VARIABLE

PIECE = 1 << 16  # bytes read from a rank at once


class Rank:
    """One process, the launcher's end of its socket, and its pidfd."""

    def __init__(self, number: int, argv: list[str], env: dict[str, str]) -> None:
        self.number = number
        self.status: int | None = None  # as subprocess: negative for a signal
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.pidfd = -1
        try:
            self.socket.setblocking(False)
            env = {**env, RANK_VARIABLE: str(number), FD_VARIABLE: str(theirs.fileno())}
            stdin = None if number == 0 and not _stdin_is_terminal() else subprocess.DEVNULL
            self.process = subprocess.Popen(
                argv, env=env, stdin=stdin, pass_fds=[theirs.fileno()], process_group=0
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(AttributeError, OSError):
            self.pidfd = os.pidfd_open(self.process.pid)

    def look(self) -> bool:
        """Returns whether the process has ended since the last look. Does not reap the process."""
        if self.status is not None:
            return False
        try:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            # Other code in this process reaped it: its number may belong to another process by now.
            self.process.returncode = self.status = 1
            return True
        if info is not None:
            self.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        return info is not None

    def receive(self) -> bytes | None:
        """Returns bytes from the rank; empty at the end of the stream, None if none have arrived."""
        try:
            return self.socket.recv(PIECE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def stop_listening(self) -> None:
        """Takes no more bytes, and drops those that have arrived: a full socket would make the rank wait."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)
        while self.receive():
            pass

    def signal(self, number: int) -> None:
        """Sends a signal to the rank's process group."""
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:  # it moved to a session of its own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.process.pid, number)
            except PermissionError:  # a setuid program
                pass

    def close(self) -> None:
        """Kills the rest of the group, then reaps."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    @property
    def what_happened(self) -> str:
        status = self.status or 0
        if status >= 0:
            return f"exited with status {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"


def _stdin_is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False
