"""Messages with tags across virtual nodes: one contract over every transport."""

from __future__ import annotations

import re

import pytest

import fabric
import ranks

TRANSPORTS = (
    pytest.param("mpi", marks=pytest.mark.mpi),
    pytest.param("gloo", marks=pytest.mark.torch),
    *(
        pytest.param(f"fabric {provider}", marks=pytest.mark.fabric)
        for provider in ("tcp", "tcp;ofi_rxm", "sockets", "udp;ofi_rxd", "shm")
    ),
)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name, _, provider = request.param.partition(" ")
    if name == "fabric" and (reason := fabric.missing(provider)):
        pytest.skip(reason)
    return str(request.param)


def play(transport: str, program: str, nodes: str) -> ranks.Outcome:
    name, _, provider = transport.partition(" ")
    if name == "mpi":
        return ranks.play_mpi(len(nodes), f"message_programs:{program}", nodes)
    env = {"UNISONO_TRANSPORT": name, "UNISONO_FABRIC_PROVIDER": provider}
    return ranks.play(len(nodes), f"message_programs:{program}", nodes, env=env)


@pytest.mark.parametrize(
    ("program", "nodes"),
    [("messages", "ab"), ("messages", "abb"), ("large", "abab"), ("borders", "ab"), ("borders", "aba")],
)
def test_messages(transport: str, program: str, nodes: str) -> None:
    assert play(transport, program, nodes).results() == [[]] * len(nodes)


def test_messages_outlast_their_sender(transport: str) -> None:
    assert play(transport, "ends_with_messages", "ab").results() == [0, 100 * sum(range(40))]


def test_a_deadline(transport: str) -> None:
    """Both ranks have the text, which names the rank and the tag that has come."""
    errors = [one["error"] for one in play(transport, "late", "ab").results()]
    assert {error["type"] for error in errors} == {"TimeoutError"}, errors
    assert len({error["text"] for error in errors}) == 1, errors
    pattern = r"recv with tag 3 of rank 0 has waited 1 s for rank 1: .*messages with tag 4 have come"
    assert re.match(pattern, errors[0]["text"]), errors


def test_a_deadline_of_a_long_message(transport: str) -> None:
    errors = [one["error"] for one in play(transport, "late_send", "ab").results()]
    assert {error["type"] for error in errors} == {"TimeoutError"}, errors
    assert len({error["text"] for error in errors}) == 1, errors
    assert errors[0]["text"].startswith("send with tag 3 of rank 0 has waited 1 s for rank 1: "), errors


@pytest.mark.parametrize("program", ["lost", "lost_midway"])
def test_a_lost_peer(transport: str, program: str) -> None:
    """A rank that has died is named. MPI's launcher ends the others. Over shm of an old libfabric a rank may
    die with a lock that another one waits for: then that one ends, and says so."""
    if transport == "mpi":
        pytest.skip("mpiexec ends the other ranks")
    outcome = play(transport, program, "aba")
    for rank in (0, 2):
        if outcome.ranks[rank] is None and transport == "fabric shm":
            assert "waits for; this process ends" in outcome.ended.output, outcome.ended
            continue
        error = outcome.ranks[rank]["result"]["error"]
        assert error["type"] == "PeerLostError", outcome
        assert "rank 1 " in error["text"], outcome
