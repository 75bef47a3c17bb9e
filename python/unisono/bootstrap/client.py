"""The rank's side of `unisono run`: an all_gather over a socket inherited from the launcher.

hub.py defines the messages.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import math
import os
import signal
import socket
import stat
import struct
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..clock import LOOK_S, Clock
from ..errors import PeerLostError, ResourceError, TimeoutError, UnisonoError, UsageError
from ..launch.detect import FD_VARIABLE
from .base import at_exit, check_payload, check_timeout
from .hub import Decoder, Frame, FrameError, Kind, encode

A = TypeVar("A")
T = TypeVar("T")
_ANSWER_GRACE_S = 5.0  # how long past the deadline a rank waits for the launcher to say who is missing
_PR_SET_PDEATHSIG = 1


class HubBootstrap:
    """The bootstrap of ranks started by `unisono run`: the launcher collects and hands out the bytes.

    All bootstraps of a process share the launcher's socket, so that `init()` can be called more than once.
    Every rank must then make its calls in the same order, which the launcher checks.

    Args:
        rank, size: from the launcher.
        fd: the inherited socket, `UNISONO_BOOTSTRAP_FD`.
        timeout_s: how long one all_gather waits for the last rank.
    """

    def __init__(self, rank: int, size: int, fd: int, timeout_s: float = 30.0) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = check_timeout(timeout_s)
        self._connection = _Connection.of(fd)
        self._channel = self._connection.new_channel()
        self._sequence = 0

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Bootstrap.all_gather`; an error names the rank that is missing."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        timeout_ms = min(max(1, math.ceil(self._timeout_s * 1000)), 0xFFFFFFFF)
        place = (self._channel, sequence)
        message = encode(Kind.DATA, self.rank, place, check_payload(data), timeout_ms)
        frames = self._connection.exchange(message, self.size, self._timeout_s)
        for source, (header, _) in enumerate(frames):
            if (header.rank, header.place) != (source, place):
                raise self._connection.give_up(
                    UnisonoError(
                        f"the launcher answered out of order: {header}, wanted the bytes of rank {source}"
                    )
                )
        return [payload for _, payload in frames]

    def close(self) -> None:
        """Does nothing: other bootstraps may need the socket, and the launcher sees the process end."""


class _Connection:
    """The socket to the launcher: one per process, used by one all_gather at a time."""

    _all: dict[int, _Connection] = {}  # noqa: RUF012 - shared on purpose
    _all_lock = threading.Lock()

    def __init__(self, fd: int) -> None:
        self._socket = _inherited_socket(fd)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._channels = 0
        self._decoder = Decoder()
        self._failure: UnisonoError | None = None

    @classmethod
    def of(cls, fd: int) -> _Connection:
        with cls._all_lock:
            if fd not in cls._all:
                cls._all[fd] = cls(fd)
                at_exit.callback(cls._all[fd].close)
            return cls._all[fd]

    def close(self) -> None:
        self._socket.close()

    def new_channel(self) -> int:
        with self._lock:
            self._channels += 1
            return self._channels - 1

    def give_up(self, error: UnisonoError) -> UnisonoError:
        """Returns `error`, which every later call raises, because the stream cannot be trusted any more."""
        self._failure = self._failure or error
        return error

    def exchange(self, message: bytes, count: int, timeout_s: float) -> list[Frame]:
        """Sends one message. Returns the `count` DATA messages of the answer."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"this process was forked from a rank (pid {self._pid}) and cannot speak for it: "
                "call unisono.init() in the rank itself, or unset the UNISONO_* variables in its workers"
            )
        with self._lock:
            if self._failure is not None:
                raise type(self._failure)(*self._failure.args)
            try:
                return self._exchange(message, count, timeout_s)
            except BaseException as error:  # also KeyboardInterrupt: half an answer may be left in the stream
                text = f"an earlier all_gather did not finish: {error!r}"
                self.give_up(error if isinstance(error, UnisonoError) else UnisonoError(text))
                raise

    def _exchange(self, message: bytes, count: int, timeout_s: float) -> list[Frame]:
        frames: list[Frame] = []
        clock, rest = Clock(), memoryview(message)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer below says why
                while rest:
                    rest = rest[self._tried(clock, timeout_s, self._socket.send, rest) :]
            while len(frames) < count:
                data = self._tried(clock, timeout_s + _ANSWER_GRACE_S, self._socket.recv, 1 << 16)
                if not data:
                    raise PeerLostError(
                        "the launcher (`unisono run`) has ended: the ranks cannot meet without it"
                    )
                for frame in self._decoder.feed(data):
                    if frame.header.kind is not Kind.DATA:
                        raise frame.header.kind.error(frame.payload.decode("utf-8", "replace"))
                    frames.append(frame)
        except FrameError as error:
            raise UnisonoError(f"the launcher sent bytes that are no Unisono message: {error}") from error
        except OSError as error:
            if isinstance(error, UnisonoError):
                raise
            if isinstance(error, socket.timeout):
                raise TimeoutError("the launcher (`unisono run`) did not answer: is it stopped?") from None
            raise PeerLostError(f"the connection to the launcher (`unisono run`) broke: {error}") from error
        if len(frames) > count or self._decoder.partial:
            raise UnisonoError("the launcher sent more than one answer")
        return frames

    def _tried(self, clock: Clock, deadline: float, call: Callable[[A], T], argument: A) -> T:
        """Repeats a `call` of the socket until it succeeds or the deadline is past. Returns its result. Each
        try is short, since a long wait would count a pause of the process."""
        while True:
            self._socket.settimeout(min(LOOK_S, max(deadline - clock(), 1e-3)))  # 0 would mean not to block
            try:
                return call(argument)
            except builtins.TimeoutError:
                if clock() >= deadline:
                    raise


def inherited_fd(env: Mapping[str, str]) -> int:
    """Returns the descriptor of the launcher's socket, from the environment. Raises UsageError."""
    text = env.get(FD_VARIABLE, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 8 and int(text) > 2):
        raise UsageError(
            f"UNISONO_RANK is set, but {FD_VARIABLE}={text!r} is no file descriptor of a launcher: "
            "start the program with `unisono run`, or unset the UNISONO_* variables"
        )
    return int(text)


def _inherited_socket(fd: int) -> socket.socket:
    """Returns the launcher's socket, and has a child of the launcher end with it. Raises UsageError if `fd`
    is not the launcher's socket."""
    wrong = UsageError(
        f"{FD_VARIABLE}={fd} is not the launcher's socket here: this is probably a child of a rank, which "
        "does not inherit it; call unisono.init() in the rank, or unset the UNISONO_* variables for the child"
    )
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise wrong
        connection = socket.socket(fileno=fd)
    except OSError as error:
        raise wrong from error
    try:
        if (connection.family, connection.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
            raise wrong
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except BaseException:
        connection.detach()  # not ours: leave the descriptor as it was
        raise
    os.set_inheritable(fd, False)
    die_with_parent(struct.unpack("3i", credentials)[0])
    return connection


def die_with_parent(launcher: int) -> None:
    """Has the kernel kill this process when the launcher ends, also if SIGKILL ends the launcher. Raises
    ResourceError if the kernel refuses, PeerLostError if the launcher has ended already."""
    if launcher != os.getppid():
        return  # started through a shell or a container: the launcher ends the process group instead
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise ResourceError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if launcher != os.getppid():
        raise PeerLostError("the launcher (`unisono run`) has ended: the ranks cannot meet without it")
