"""The programs of test_hostile.py: bootstraps that lie. Each has its own process, which must not crash."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import unisono
from rank_main import describe

# The greeting of src/host/group.cpp: magic, version, rank, size, check, machine, chunk_bytes, core_cache; the
# handle's pid, fd, bytes and nonce; nonce_at, two ways of chunks, the kernel's copies, and 16 words of cores.
GREETING = struct.Struct("=8sIiiIQQQiiQQQ3B5x16Q")
FIELDS = "magic version rank size check machine chunk_bytes core_cache pid fd bytes nonce nonce_at".split()


class Liar:
    """A bootstrap for rank 0 of two. The other's greeting is forged from this rank's. The names of the nodes,
    which come before, are honest."""

    def __init__(self, forge: Callable[[bytes], Any]) -> None:
        self.rank, self.size = 0, 2
        self._forge = forge

    def all_gather(self, data: bytes) -> Any:
        if len(data) == GREETING.size:
            return [data, self._forge(data)]
        return [data, data.replace(b" 0 ", b" 1 ", 1)]  # src/nodes/topology.cpp: name, version, rank, ...

    def close(self) -> None:
        pass


def forged(**changes: Any) -> Callable[[bytes], bytes]:
    """Returns a function that makes rank 1's greeting from rank 0's, with these fields changed. A function
    gets the old value."""

    def forge(data: bytes) -> bytes:
        assert len(data) == GREETING.size, "the greeting has changed: change this test too"
        values = list(GREETING.unpack(data))
        for name, value in {"rank": 1, **changes}.items():
            at = FIELDS.index(name)
            values[at] = value(values[at]) if callable(value) else value
        return GREETING.pack(*values)

    return forge


def outcome_of(bootstrap: Any) -> dict[str, Any]:
    """Returns how init ends with that bootstrap, as JSON."""
    try:
        unisono.init(bootstrap=bootstrap, timeout_s=5).close()
    except Exception as error:
        return describe(error)
    return {"type": None, "text": "init went well"}


GREETINGS: dict[str, Callable[[bytes], Any]] = {
    "empty": lambda data: b"",
    "garbage": lambda data: random.Random(1).randbytes(len(data)),
    "short": lambda data: data[:-1],
    "long": lambda data: data + b"\0",
    "a megabyte": lambda data: bytes(1 << 20),
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: "unisono",
    "None": lambda data: None,
    "number": lambda data: 7,
    "bytearray": bytearray,
    "magic": forged(magic=b"unisona\0"),
    "version": forged(version=lambda version: version + 1),
    "rank twice": forged(rank=0),
    "rank below 0": forged(rank=-1),
    "size": forged(size=3),
    "machine": forged(machine=lambda machine: machine ^ 1),
    "chunk_bytes": forged(chunk_bytes=lambda size: size + 64),
    "check": forged(check=lambda check: 1 - check),
    "same memory": forged(),
    "bytes 0": forged(nonce=1, bytes=0),
    "bytes + 1": forged(nonce=1, bytes=lambda size: size + 1),
    "bytes 2^63": forged(nonce=1, bytes=1 << 63),
    "bytes 2^64 - 1": forged(nonce=1, bytes=(1 << 64) - 1),
    "no such mark": forged(nonce=12345),
    "fd -1": forged(nonce=1, pid=1, fd=-1),
    "fd 2^31 - 1": forged(nonce=1, pid=1, fd=(1 << 31) - 1),
    "pid 0": forged(nonce=1, pid=0),
    "pid -1": forged(nonce=1, pid=-1),
    "pid of nobody": forged(nonce=1, pid=(1 << 22) - 1),
}


def greetings() -> dict[str, dict[str, Any]]:
    """Calls init with each of the forged greetings."""
    return {name: outcome_of(Liar(forge)) for name, forge in GREETINGS.items()}


@contextlib.contextmanager
def _holder(fd: int) -> Iterator[int]:
    """Runs a process that has `fd` open under the same number."""
    child = subprocess.Popen(["sleep", "60"], pass_fds=[fd])
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


def _file_of(size: int) -> int:
    handle, path = tempfile.mkstemp()
    os.unlink(path)
    os.truncate(handle, size)
    return handle


def _read_only(size: int) -> int:
    with tempfile.NamedTemporaryFile() as made:
        os.truncate(made.fileno(), size)
        os.chmod(made.name, 0o400)
        return os.open(made.name, os.O_RDONLY)


def _sealed(size: int) -> int:
    import fcntl

    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    return fd


def _memfd(size: int) -> int:
    fd = os.memfd_create("other")
    os.truncate(fd, size)
    return fd


HEAD = 4096  # bytes: a segment has its own page before the announced bytes
THINGS: dict[str, Callable[[int], int]] = {
    "/dev/null": lambda size: os.open("/dev/null", os.O_RDWR),
    "/dev/zero": lambda size: os.open("/dev/zero", os.O_RDWR),
    "directory": lambda size: os.open("/tmp", os.O_RDONLY),
    "pipe": lambda size: os.pipe()[0],
    "socket": lambda size: socket.socketpair()[0].detach(),
    "empty file": lambda size: _file_of(0),
    "file without the page": _file_of,
    "file without the mark": lambda size: _file_of(size + HEAD),
    "larger file": lambda size: _file_of(size + HEAD + 1),
    "read-only file": lambda size: _read_only(size + HEAD),
    "memory without the mark": lambda size: _memfd(size + HEAD),
    "sealed memory": lambda size: _sealed(size + HEAD),
}


def things() -> dict[str, dict[str, Any]]:
    """Calls init with greetings that announce something else that another process has open."""
    return {name: _thing(name) for name in THINGS}


def _thing(name: str) -> dict[str, Any]:

    def forge(data: bytes) -> bytes:
        size = GREETING.unpack(data)[FIELDS.index("bytes")]
        fd = THINGS[name](size)
        pid = stack.enter_context(_holder(fd))
        return forged(nonce=99, pid=pid, fd=fd)(data)

    with contextlib.ExitStack() as stack:
        return outcome_of(Liar(forge))


def mutations(count: int) -> dict[str, int]:
    """Calls init with many greetings whose bytes are changed at random. Returns the errors, by class."""
    rng, seen = random.Random(7), {}

    def forge(data: bytes) -> bytes:
        changed = bytearray(forged()(data))
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = rng.randrange(len(changed)) if rng.random() < 0.1 else len(changed)
        return bytes(changed[:cut])

    for _ in range(count):
        kind = str(outcome_of(Liar(forge))["type"])
        seen[kind] = seen.get(kind, 0) + 1
    return seen


class Odd:
    """A bootstrap for one rank that answers `first`, then `second`; None: the right answer."""

    def __init__(self, first: Any = None, second: Any = None, rank: Any = 0, size: Any = 1) -> None:
        self.rank, self.size = rank, size
        self._answers = [first, second]

    def all_gather(self, data: bytes) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [data] if answer is None else answer(data)

    def close(self) -> None:
        pass


ODD: dict[str, Callable[[], Any]] = {
    "no greeting": lambda: Odd(lambda data: []),
    "two greetings": lambda: Odd(lambda data: [data, data]),
    "no list": lambda: Odd(lambda data: 5),
    "nothing": lambda: Odd(lambda data: _nothing()),
    "bytes, not a list": lambda: Odd(lambda data: data),
    "second: no list": lambda: Odd(None, lambda data: 5),
    "second: text": lambda: Odd(None, lambda data: ["far"]),
    "raises": lambda: Odd(KeyError("the bootstrap's own error")),
    "raises later": lambda: Odd(None, OSError("the bootstrap's own error")),
    "rank = size": lambda: Odd(rank=1),
    "rank -1": lambda: Odd(rank=-1),
    "size 0": lambda: Odd(size=0),
    "size 5000": lambda: Odd(size=5000),
    "rank None": lambda: Odd(rank=None),
    "rank 0.5": lambda: Odd(rank=0.5),
    "size in words": lambda: Odd(size="1"),
    "no close": type("Bare", (), {"rank": 0, "size": 1, "all_gather": lambda self, data: [data]}),
    "no all_gather": type("Bare", (), {"rank": 0, "size": 1}),
    "string": lambda: "mpi",
}


def _nothing() -> None:
    return None


def odd() -> dict[str, dict[str, Any]]:
    """Calls init with bootstraps that break their protocol."""
    return {name: outcome_of(make()) for name, make in ODD.items()}


def second_answer_is_not_trusted() -> float:
    """Sums with false answers to the second all_gather, which only decides on direct copies of memory."""
    total = 0.0
    for answer in ([], [b"?"], [b"far", b"far"], [b"\xff" * 100_000]):
        with unisono.init(bootstrap=Odd(None, lambda data, answer=answer: answer)) as comm:
            total += float(comm.all_reduce(np.ones(3, np.float32))[0])
    return total
