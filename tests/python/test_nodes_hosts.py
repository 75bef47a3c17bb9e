"""Ranks on hosts of their own (support/hosts.py): right results, and links that fail, delay and drop."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fabric
import hosts
import ranks

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or "")]
EACH = 2
needs_fabric = pytest.mark.skipif(fabric.missing("tcp") is not None, reason=str(fabric.missing("tcp")))


def play(
    made: hosts.Hosts, launcher: str, program: str, *args: object, timeout_s: float = 60, **env: str
) -> ranks.Outcome:
    """Runs the program on all hosts."""

    def start(argv: Sequence[str]) -> ranks.Ended:
        run = made.mpiexec if launcher == "mpiexec" else made.torchrun
        return run(EACH, argv, env, timeout_s)

    return ranks.play_by(start, EACH * len(made.numbers), program, *args, within_s=10)


def right(answer: Sequence[Any], count: int, transport: str, calls: int) -> None:
    nodes = [[EACH * node, EACH * node + 1] for node in range(count)]
    for one in answer:
        assert (one["nodes"], one["transport"], one["words"]) == (nodes, transport, {})
        assert one["calls"] >= calls


@pytest.mark.parametrize(("count", "step"), [(2, 8), (3, 8), (4, 16)])
def test_hosts_of_an_mpi_run(count: int, step: int) -> None:
    with hosts.hosts(count) as made:
        outcome = play(made, "mpiexec", "node_programs:sample", step)
    right(outcome.results(), count, "MPI", 30)


@needs_fabric
@pytest.mark.fabric
def test_hosts_that_speak_by_the_fabric_lane() -> None:
    with hosts.hosts(3) as made:
        outcome = play(made, "mpiexec", "node_programs:sample", 8, UNISONO_TRANSPORT="fabric")
    right(outcome.results(), 3, "the fabric", 30)


@needs_fabric
@pytest.mark.fabric
@pytest.mark.parametrize("known", ["MASTER_ADDR", "route"])
def test_hosts_with_a_bridge_of_containers(known: str) -> None:
    """An interface has the same address on both hosts. The lane takes the one between the hosts."""
    env = {"UNISONO_TRANSPORT": "fabric", "UNISONO_FABRIC_PROVIDER": "tcp", "UCX_NET_DEVICES": "e0"}
    with hosts.hosts(2) as made:
        for number in made.numbers:
            made.add_bridge(number)
            if known == "route":
                made.add_route(number)
        if known == "MASTER_ADDR":
            env["MASTER_ADDR"] = made.address(1)
        outcome = play(made, "mpiexec", "node_programs:sample", 32, **env)
    right(outcome.results(), 2, "the fabric", 10)


@pytest.mark.torch
def test_hosts_of_torchrun() -> None:
    with hosts.hosts(2) as made:
        outcome = play(made, "torchrun", "node_programs:sample", 8)
    right(outcome.results(), 2, "gloo", 60)


def test_a_host_that_knows_itself_by_its_loopback() -> None:
    """Gloo takes the address of the default route, and fails without one."""
    set_address = "import os; os.environ['MASTER_ADDR'] = '127.0.1.1'"
    code = f"{set_address}; from unisono.gloo import _address; print(_address())"
    with hosts.hosts(1) as made:
        inside = ["ip", "netns", "exec", made.name(1), sys.executable, "-c", code]
        refused = ranks.run(inside)
        made.add_route(1)
        found = ranks.run(inside)
    assert "knows no way to the other nodes" in refused.output and "GLOO_SOCKET_IFNAME" in refused.output
    assert found.output.strip() == made.address(1)


@pytest.mark.parametrize("how", ["netem delay 3ms 2ms loss 5%", "tbf rate 50mbit burst 8k limit 8k"])
def test_packets_late_and_lost(how: str) -> None:
    with hosts.hosts(2) as made:
        try:
            made.disturb(2, how)
        except OSError as error:
            pytest.skip(f"this kernel lacks the queue ({error})")
        outcome = play(made, "mpiexec", "node_programs:sample", 20, 7)
        dropped = made.dropped(2)
    right(outcome.results(), 2, "MPI", 20)
    assert dropped > 0


def cut_when(flag: Path, made: hosts.Hosts, number: int) -> threading.Thread:
    """Cuts a host off shortly after the ranks are at work, until they report that they have failed.

    The launcher would wait for a host that stays cut off."""

    def appears(path: Path) -> bool:
        deadline = time.monotonic() + 100
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return path.exists()

    def cut() -> None:
        if not appears(flag):
            return
        time.sleep(0.05)
        made.cut(number)
        for rank in range(EACH * len(made.numbers)):
            appears(flag.with_name(f"{flag.name} {rank}"))
        made.mend(number)

    thread = threading.Thread(target=cut)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("transport", "count"),
    [
        ("mpi", 500),
        ("mpi", 4_000_000),
        pytest.param("gloo", 4_000_000, marks=pytest.mark.torch),
        pytest.param("fabric", 500, marks=[needs_fabric, pytest.mark.fabric]),
        pytest.param("fabric", 4_000_000, marks=[needs_fabric, pytest.mark.fabric]),
    ],
)
def test_a_link_cut_within_a_collective(transport: str, count: int, tmp_path: Path) -> None:
    """Every rank gets an error within the deadline that names its peer, and again in the next call."""
    timeout_s, program = 4.0, "node_programs:until_it_fails"
    with hosts.hosts(2) as made:
        cutting = cut_when(tmp_path / "flag", made, 2)
        env = {"UNISONO_TRANSPORT": transport, "GLOO_SOCKET_IFNAME": "e0"}
        args = (str(tmp_path / "flag"), timeout_s, count)
        try:
            outcome = play(made, "mpiexec", program, *args, timeout_s=120, **env)
        finally:
            cutting.join()
    for rank, answer in enumerate(outcome.results()):
        assert "wrong" not in answer, answer
        text = answer["error"]["text"]
        others = ("2 (node 1)", "3 (node 1)") if rank < 2 else ("0 (node 0)", "1 (node 0)")
        if transport == "fabric":  # the lane's messages name ranks, not nodes
            others = tuple(other.split()[0] for other in others)
        assert any(f"rank {other}" in text for other in others), (rank, text)
        assert answer["error"]["type"] in ("TimeoutError", "PeerLostError")
        assert answer["again"] == answer["error"]
        assert answer["waited"] < 2 * timeout_s + 5
