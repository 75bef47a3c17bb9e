"""False data from the bootstrap, or from other processes, ends in an error and never in a crash."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import hostile_programs
import ranks
import threads
import unisono


@cache
def said_by(program: str, *args: object) -> Any:
    """Runs a program in a process of its own. Returns its output."""
    return ranks.play(1, f"hostile_programs:{program}", *args).results()[0]


USAGE = (
    "empty garbage short long zeros text None number bytearray magic version size machine check chunk_bytes"
).split()
WORDS = {
    "rank twice": "two ranks are numbered 0",
    "version": "same version",
    "size": "rank 1 counts 3 ranks, this one 2",
    "machine": "another machine",
    "chunk_bytes": "UNISONO_CHUNK_BYTES",
    "check": "unlike this one: give check=, or UNISONO_CHECK, the same on every rank",
    "same memory": "two ranks announce the same memory",
    "no such mark": "is not one that this process has made",
    "short": "rank 1",
    "text": "other objects than bytes",
}


@pytest.mark.parametrize("name", hostile_programs.GREETINGS)
def test_forged_greeting(name: str) -> None:
    error = said_by("greetings")[name]
    usage = name in USAGE or name.startswith(("rank", "same", "a megabyte"))
    assert error["type"] == ("UsageError" if usage else "ResourceError"), error
    assert WORDS.get(name, "") in error["text"]


@pytest.mark.parametrize("name", hostile_programs.THINGS)
def test_handle_of_something_else(name: str) -> None:
    error = said_by("things")[name]
    assert error["type"] == "ResourceError", error
    assert "shared memory" in error["text"]


def test_mutated_greetings() -> None:
    seen = said_by("mutations", 2000)
    assert set(seen) <= {"UsageError", "ResourceError"}, seen
    assert sum(seen.values()) == 2000


@pytest.mark.parametrize("name", hostile_programs.ODD)
def test_bootstrap_that_breaks_its_protocol(name: str) -> None:
    error = said_by("odd")[name]
    kinds = {"raises": "KeyError", "raises later": "OSError"}
    assert error["type"] == kinds.get(name, "UsageError"), error


def test_second_answer() -> None:
    assert said_by("second_answer_is_not_trusted") == 4


def test_duplicate_ranks_between_threads() -> None:
    """Two threads that both take themselves for rank 0 both get an error."""

    class Twice:
        """A bootstrap that makes every caller rank 0."""

        def __init__(self, meeting: Any) -> None:
            self.rank, self.size = 0, 2
            self._meeting = meeting

        def all_gather(self, data: bytes) -> list[bytes]:
            return self._meeting(data)

        def close(self) -> None:
            pass

    with threads.team(2) as comms:

        def body(comm: unisono.Communicator) -> None:
            def meeting(data: bytes) -> list[bytes]:
                return [row.tobytes() for row in comm.all_gather(np.frombuffer(data, np.uint8))]

            unisono.init(bootstrap=Twice(meeting))

        for error in threads.attempt(comms, body):
            assert isinstance(error, unisono.UsageError), repr(error)
            assert "two ranks are numbered 0: give each its own number" in str(error)


def test_rank_without_bootstrap() -> None:
    with pytest.raises(unisono.UsageError, match="rank and size go together"):
        unisono.init(rank=0)
    with pytest.raises(unisono.UsageError, match="does not know how to reach the others"):
        unisono.init(rank=0, size=2)
    with pytest.raises(unisono.UsageError, match="rank must be from 0"):
        unisono.init(rank=2, size=2)
