"""The arguments of `bootstrap.make`, and the bootstrap of `unisono run` under a hostile or real launcher."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootstrap_programs import GATHER, MAKE, MEET
from unisono import bootstrap, launch
from unisono.bootstrap import HubBootstrap, SingleBootstrap, client
from unisono.bootstrap.hub import MAX_PAYLOAD, Kind, encode
from unisono.errors import MismatchError, PeerLostError, TimeoutError, UnisonoError, UsageError
from unisono.launch import World

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("ranks_find_unisono")]
GOOD = encode(Kind.DATA, 1, (0, 0), b"payload", 1000)


# HubBootstrap against a hostile launcher, in this process


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, int]]:
    """Yields the launcher's end, and the descriptor that the rank inherits."""
    monkeypatch.setattr(client._Connection, "_all", {})
    monkeypatch.setattr(client, "_ANSWER_GRACE_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours:
        yield ours, theirs.detach()
    for connection in client._Connection._all.values():
        connection.close()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            UnisonoError,
            "the launcher sent bytes that are no Unisono message",
        ),
        (GOOD[:24] + b"\x7f\xff\xff\xff", UnisonoError, "length 2147483647 is above"),
        (encode(Kind.DATA, 1, (0, 0), b"") * 2, UnisonoError, "answered out of order"),
        (encode(Kind.DATA, 0, (7, 0), b"") * 2, UnisonoError, "answered out of order"),
        (encode(Kind.DATA, 0, (0, 0), b"") * 3, UnisonoError, "more than one answer"),
        (encode(Kind.DATA, 0, (0, 0), b"") * 2 + b"U", UnisonoError, "more than one answer"),
        (encode(Kind.LOST, 1, (0, 0), b"rank 1 \xff is gone"), PeerLostError, "rank 1 . is gone"),
        (encode(Kind.TIMEOUT, 1, (0, 0), b"late"), TimeoutError, "late"),
        (encode(Kind.MISMATCH, 1, (0, 0), b"differ"), MismatchError, "differ"),
        (encode(Kind.DATA, 0, (0, 0), b""), TimeoutError, "did not answer"),
        (GOOD[:-1], TimeoutError, "did not answer"),
        (b"", TimeoutError, "did not answer"),
    ],
)
def test_a_hostile_answer_is_an_error_and_stays_one(
    ends: tuple[socket.socket, int], answer: bytes, error: type[UnisonoError], words: str
) -> None:
    ours, fd = ends
    rank = HubBootstrap(0, 2, fd, timeout_s=0.05)
    ours.sendall(answer)
    with pytest.raises(error, match=words):
        rank.all_gather(b"")
    with pytest.raises(error, match=words):
        rank.all_gather(b"")
    rank.close()


def test_a_launcher_that_ends_is_an_error(ends: tuple[socket.socket, int]) -> None:
    ours, fd = ends
    ours.close()
    with pytest.raises(PeerLostError, match=r"launcher .* has ended"):
        HubBootstrap(0, 2, fd).all_gather(b"")


def test_a_launcher_that_reads_nothing_is_an_error(ends: tuple[socket.socket, int]) -> None:
    _, fd = ends
    with pytest.raises(TimeoutError, match="did not answer"):
        HubBootstrap(0, 2, fd, timeout_s=0.05).all_gather(bytes(MAX_PAYLOAD))


def test_a_descriptor_that_is_no_launcher_is_an_error(tmp_path: Path) -> None:
    world = World(0, 2, 0, 2, "unisono")
    for text in ("", "x", "-1", "2", "99999999999", "٣٣"):
        with pytest.raises(UsageError, match=r"UNISONO_BOOTSTRAP_FD=.*start the program with `unisono run`"):
            bootstrap.make(world, env={"UNISONO_BOOTSTRAP_FD": text})
    with (tmp_path / "file").open("w") as file, socket.socket() as tcp:
        for fd in (file.fileno(), tcp.fileno(), 9999):
            with pytest.raises(UsageError, match=f"FD={fd} is not the launcher's socket"):
                bootstrap.make(world, env={"UNISONO_BOOTSTRAP_FD": str(fd)})
        assert not file.closed and os.fstat(tcp.fileno())


# HubBootstrap under a real launcher


def _run(n: int, code: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    status = launch.run_local(n, [sys.executable, "-c", code])
    return status, sorted(capfd.readouterr().out.splitlines())


@pytest.mark.parametrize("n", [1, 3])
def test_hub(n: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run_local(n, [sys.executable, str(GATHER)]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"{rank} {n} HubBootstrap" for rank in range(n)]


def test_hub_serves_more_than_one_communicator(capfd: pytest.CaptureFixture[str]) -> None:
    code = "c = bootstrap.make(world); say(c.all_gather(b'c'), b.all_gather(b'b'), c.all_gather(b'd'))"
    assert _run(2, MEET + code, capfd) == (0, ["[b'c', b'c'] [b'b', b'b'] [b'd', b'd']"] * 2)


def test_hub_finds_communicators_made_in_different_order(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
c = bootstrap.make(world)
try:
    (b if rank else c).all_gather(b"")
except errors.MismatchError as error:
    say("rank 0 is in all_gather 0 of communicator 1" in str(error), "rank 1 is in" in str(error))
"""
    assert _run(2, MEET + code, capfd) == (0, ["True True"] * 2)


def test_hub_names_the_rank_that_never_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
bootstrap.make(world, timeout_s=60).all_gather(b"")  # all are here: the short deadline is not for their start
b = bootstrap.make(world, timeout_s=2 if world.rank else 60)
if b.rank == 1:
    sys.stdin.read()
    os.read(os.pipe()[0], 1)
try:
    b.all_gather(b"")
except TimeoutError as error:
    say(isinstance(error, errors.TimeoutError), error)
    sys.exit(2)
"""
    status = launch.run_local(3, [sys.executable, "-c", MAKE + code], grace_s=2)
    text = "True rank 1 did not reach the all_gather that ranks 0 and 2 waited in for 2 s"
    assert (status, capfd.readouterr().out.splitlines()) == (2, [text] * 2)


def test_a_process_that_is_no_rank_gets_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import subprocess
b.all_gather(b"")
if "child" not in sys.argv:
    again = "import os; from unisono import bootstrap, launch; bootstrap.make(launch.from_env(os.environ))"
    say(subprocess.run([sys.executable, "-c", again], capture_output=True, text=True).stderr.splitlines()[-1])
    if os.fork() == 0:
        try:
            b.all_gather(b"")
        except errors.UsageError as error:
            say(error)
        os._exit(0)
    os.wait()
"""
    status, lines = _run(1, MEET + code, capfd)
    assert status == 0 and len(lines) == 2
    assert lines[0].startswith("this process was forked from a rank")
    assert "is not the launcher's socket here: this is probably a child of a rank" in lines[1]


# Single, and what make() accepts


def test_single() -> None:
    single = bootstrap.make(World(0, 1, 0, 1, "none"))
    assert isinstance(single, SingleBootstrap) and single.all_gather(b"x") == [b"x"]
    single.close()
    launchers: list[launch.Launcher] = ["torchrun", "mpich", "slurm", "explicit"]
    for launcher in launchers:
        assert isinstance(bootstrap.make(World(0, 1, 0, 1, launcher)), SingleBootstrap)
    with pytest.raises(UsageError, match="at most 1048576 bytes"):
        single.all_gather(bytes(MAX_PAYLOAD + 1))


class Own:
    def __init__(self, rank: Any = 1, size: Any = 2) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data] * self.size

    def close(self) -> None: ...


class NoClose:
    rank, size = 0, 1
    all_gather = print


def test_make_takes_an_object_with_the_protocol() -> None:
    own = Own()
    assert bootstrap.make(World(0, 1, 0, 1, "none"), own) is own
    assert bootstrap.make(World(1, 2, 1, 2, "explicit"), own) is own
    assert bootstrap.make(World(5, 8, 5, 8, "torchrun"), own) is own  # a part of a run


@pytest.mark.parametrize(
    ("world", "given", "words"),
    [
        (
            World(0, 2, 0, 2, "explicit"),
            None,
            "does not know how to reach the others: give init.. bootstrap=",
        ),
        (World(0, 2, 0, 2, "explicit"), Own(1, 2), "given rank 0 of 2, its bootstrap= says rank 1 of 2"),
        (World(0, 1, 0, 1, "none"), Own(2, 2), "says rank 2 of 2"),
        (World(0, 1, 0, 1, "none"), Own("0", 2), "says rank '0' of 2"),
        (World(0, 1, 0, 1, "none"), NoClose(), "NoClose without close"),
        (World(0, 1, 0, 1, "none"), 42, "bootstrap= is a int: give an mpi4py communicator"),
    ],
)
def test_make_names_the_mistake(world: World, given: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bootstrap.make(world, given)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_make_refuses_a_wrong_timeout(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="give seconds above 0"):
        bootstrap.make(World(0, 1, 0, 1, "none"), timeout_s=timeout_s)
