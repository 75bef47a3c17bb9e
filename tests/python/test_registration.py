"""Registered arrays on every lane: calls on them, how registrations begin and end, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import fabric
import ranks
import threads
import unisono

F32 = np.float32
# by name: what the ranks' environment says, how many ranks on how many nodes
LANES: dict[str, tuple[dict[str, str], int, int]] = {
    "host": ({}, 3, 1),
    "host-staged": ({"UNISONO_FAR": "0"}, 2, 1),
    "tcp": (fabric.over("tcp"), 3, 1),
    "shm": (fabric.over("shm"), 2, 1),
    "nodes": ({"UNISONO_TRANSPORT": "fabric"}, 3, 2),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.fabric] if name in ("tcp", "shm", "nodes") else [])
        for name in LANES
    ]
)
def lane(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    provider = {"nodes": "tcp"}.get(name, name)
    if not name.startswith("host") and (reason := fabric.missing(provider)):
        pytest.skip(reason)
    return name


def play(lane: str, program: str, *args: object) -> ranks.Outcome:
    env, n, nodes = LANES[lane]
    return ranks.play(n, f"registration_programs:{program}", *args, env=env, nodes=nodes, timeout_s=120)


def test_contract_on_registered_memory(lane: str) -> None:
    for said in play(lane, "contract", lane, 3).results():
        assert said["words"] == {}
        assert said["calls"] > 100


def test_begin_and_end(lane: str) -> None:
    for both in play(lane, "life").results():
        for said in both:
            assert said["wrong"] == []
            assert said["alive"] == said["gone"] == [True] * 3
            assert said["bytes"] == 4 * 50_000 * LANES[lane][1]


def test_ends_with_its_communicator(lane: str) -> None:
    ways = ["dropped", "handle last"]
    if lane.startswith("host"):  # what NICs and nodes know lasts as long as the communicator
        ways.append("closed late")
    for said in play(lane, "ends", ways).results():
        assert said == {how: {"alive": True, "gone": True} for how in ways}


@pytest.mark.parametrize("check", [False, True])
def test_one_rank_is_wrong(lane: str, check: bool) -> None:
    """Every rank has the same words, and the communicator goes on."""
    n = LANES[lane][1]
    who = f"rank {n - 1} cannot register its memory: x "
    more = f"rank 0 registers 256 bytes, but rank {n - 1} "
    words = {
        "strides": who + "is not contiguous: pass a C-contiguous array",
        "nothing": who + "is a NoneType: pass a numpy or cupy array",
        "complex": who + "has elements of type complex128: use f32",
        "shorter": more + "252: register as many on every rank.",
        "empty": more + "0: register as many on every rank.",
    }
    for said in play(lane, "one_is_wrong", check).results():
        assert said.keys() == words.keys()
        for name, error in said.items():
            assert error["type"] == "UsageError"
            assert error["text"].startswith(words[name])
            assert error["sum"] == n


def test_overlaps(lane: str) -> None:
    for said in play(lane, "overlaps").results():
        assert len(said) == 6
        assert all("overlaps memory that is registered" in text for text in said[:4])
        assert all("is symmetric memory already" in text for text in said[4:])


@pytest.mark.parametrize("check", [False, True])
def test_ranks_make_other_calls(check: bool) -> None:
    whats = ["other", "empty", "close", *(["barrier"] if check else [])]  # a barrier has nothing to compare
    for told in play("host", "other_calls", whats, check).results():
        for said in told:
            assert said["first"]["error"]["type"] == "MismatchError", said
            assert said["again"]["error"] == said["first"]["error"]
        text = "rank 0 called Registration.close of registration 1, but rank 1 called"
        assert text in told[0]["first"]["error"]["text"]


@pytest.mark.fabric
def test_ranks_make_other_calls_on_the_fabric() -> None:
    if reason := fabric.missing("tcp"):
        pytest.skip(reason)
    for told in play("tcp", "other_calls", ["empty", "other"], False).results():
        assert {one["first"]["error"]["type"] for one in told} == {"MismatchError"}


def test_peer_that_dies(lane: str) -> None:
    *left, _ = play(lane, "peer_dies").ranks
    for said in left:
        assert said["result"]["first"]["error"]["type"] == "PeerLostError", said
        assert "error" not in said["result"]["again"]
        if lane not in ("tcp", "shm", "nodes"):  # those keep it until the communicator is gone
            assert said["result"]["gone"]


def test_block_that_raises(lane: str) -> None:
    zero, *others = play(lane, "block_raises").results()
    assert zero["error"]["type"] == "KeyError"
    for said in others:
        assert said["error"]["type"] == "PeerLostError", said


def test_forked_child(lane: str) -> None:
    for said in play(lane, "child").results():
        first, second = said["child"].splitlines()
        assert "was forked from a rank and is none itself: call register in" in first
        assert "call Registration.close in" in second
        assert said["sum"] == LANES[lane][1]


@pytest.mark.fabric
@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_direct_on_the_fabric(provider: str) -> None:
    if reason := fabric.missing(provider):
        pytest.skip(reason)
    for said in play(provider, "direct").results():
        for when in ("before", "after"):
            assert "direct needs registered buffers" in said[when]["error"]["text"]
        for when in ("during", "mixed", "across", "again"):
            assert "error" not in said[when], said[when]


def test_many(lane: str) -> None:
    assert set(play(lane, "many", 60).results()) == {0}


# ---- ranks that are threads -------------------------------------------------------------------------------


def test_threads() -> None:
    with threads.team(3) as comms:

        def body(comm: unisono.Communicator) -> None:
            x = np.full(300_000, comm.rank, F32)
            with comm.register(x) as registration:
                assert repr(registration) == "<Registration of 1200000 bytes>"
                assert not registration.closed
                comm.all_reduce(x[1:], out=x[1:])
                assert (x[1:] == 3).all()
            assert registration.closed
            comm.register(x[:10])
            with pytest.raises(unisono.UsageError, match="overlaps memory that is registered"):
                comm.register(x)
            with comm.register(x[10:]):
                comm.barrier()

        threads.together(comms, body)


def test_two_communicators_register_one_array() -> None:
    with threads.team(2) as first, threads.team(2) as second:

        def body(comm: unisono.Communicator) -> float:
            x = arrays[comm.rank]
            with comm.register(x), second[comm.rank].register(x):
                return float(second[comm.rank].all_reduce(x)[0])

        arrays = [np.ones(10, F32), np.ones(10, F32)]
        assert threads.together(first, body) == [2, 2]


def test_calls_of_another_thread() -> None:
    """register and close wait for their turn behind a call that has begun."""
    with threads.team(2, timeout_s=20) as comms:
        registrations = threads.together(comms, lambda c: c.register(np.ones(10, F32)))
        got = np.zeros(4, F32)
        begun = comms[0].recv(got, 1, asynchronous=True)

        def body(comm: unisono.Communicator) -> None:
            if comm.rank == 1:
                comm.send(np.ones(4, F32), 0)
            registrations[comm.rank].close()
            comm.register(np.ones(3, F32)).close()

        threads.together(comms, body)
        assert begun.done
        assert (begun.wait() == 1).all()
        assert registrations[0].closed


def test_one_rank() -> None:
    with unisono.init() as comm, comm.register(np.ones(3, F32)) as registration:
        assert comm.all_reduce(np.ones(3, F32)).sum() == 3
        assert registration.nbytes == 12


def test_nothing_is_said_at_the_end() -> None:
    program = "import numpy, unisono; comm = unisono.init(); x = numpy.ones(9); kept = comm.register(x)"
    ended = ranks.run([sys.executable, "-c", program])
    assert (ended.code, ended.output) == (0, "")


@pytest.mark.torch
def test_torch_tensor() -> None:
    import torch

    with threads.team(2) as comms:

        def body(comm: unisono.Communicator) -> Any:
            x = torch.ones(1000, dtype=torch.bfloat16)
            with comm.register(x):
                return float(comm.all_reduce(x[10:20])[0])

        assert threads.together(comms, body) == [2, 2]
