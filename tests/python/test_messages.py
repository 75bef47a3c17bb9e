"""Messages with tags, deadlines of calls, and communicators of some ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fabric
import ranks
import threads
import unisono


@pytest.mark.parametrize("n", [1, 3])
def test_messages(n: int) -> None:
    assert ranks.play(n, "message_programs:messages").results() == [[]] * n


@pytest.mark.parametrize("n", [1, 2, 3])
def test_large(n: int) -> None:
    assert ranks.play(n, "message_programs:large").results() == [[]] * n


def test_large_without_far_memory() -> None:
    outcome = ranks.play(2, "message_programs:large", env={"UNISONO_FAR": "0"})
    assert outcome.results() == [[]] * 2


@pytest.mark.parametrize(("n", "far"), [(2, "1"), (2, "0"), (3, "1"), (10, "0")])
def test_in_turn(n: int, far: str) -> None:
    assert ranks.play(n, "message_programs:in_turn", env={"UNISONO_FAR": far}).results() == [[]] * n


def test_across_nodes() -> None:
    outcome = ranks.play(4, "message_programs:across_nodes", nodes=2, env=fabric.between_nodes())
    for rank, (split, node) in enumerate(outcome.results()):
        assert "the ranks of color 0 are on several nodes" in split
        assert node == ("[1, 0]" if rank < 2 else "[3, 2]")


def test_faults() -> None:
    def body(comm: unisono.Communicator) -> Any:
        x = np.ones(2)
        for words, call in {
            "tag=-1": lambda: comm.send(x, 0, tag=-1),
            "source -1 is not a rank": lambda: comm.recv(x, unisono.ANY_SOURCE),
            "source 5 is not a rank": lambda: comm.recv(x, 5, tag=1),
            "timeout_s=0": lambda: comm.all_reduce(x, timeout_s=0),
        }.items():
            with pytest.raises(unisono.UsageError, match=words):
                call()
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(unisono.TimeoutError, match=r"recv with tag 3 of rank 0 has waited 0\.1 s"):
                comm.recv(x, 1, tag=3, timeout_s=0.1)
        with pytest.raises(unisono.TimeoutError, match="recv with tag 3 of rank 0"):
            comm.barrier()

    threads.with_threads(2, body)
