"""Ping-pong between pairs of ranks, and all_to_all built of sends and receives: messages, refusals and whole
runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import unisono
from bench_threads import meetings, options, run_session
from unisono import records
from unisono.bench import cases, pairs, timing, verify
from unisono.bench.align import Aligner
from unisono.bench.backends.base import Backend, Buffers
from unisono.bench.buffers import Pools
from unisono.bench.cells import make_groups
from unisono.bench.control import Control, Interrupt
from unisono.bench.device import HostDevice
from unisono.bench.session import Session, meeting
from unisono.cli import finish
from unisono.cli.app import app
from unisono.records import Case, vocabulary


def a_pingpong(ranks: int, pattern: str, pair: pairs.Pair | None, size: int = 4000) -> Case:
    case = cases.make_case(vocabulary.PINGPONG, size, "f32", ranks)
    return msgspec.structs.replace(case, pattern=pattern, pair=pair)


# ---- pairs


def test_every_two_ranks_are_a_pair_once() -> None:
    assert pairs.select(pairs.ALL, 4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert pairs.select("3-0,1-2", 4) == [(3, 0), (1, 2)]
    assert pairs.select(vocabulary.HALVES, 4) == [None]


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_in_halves_every_rank_has_one_peer_who_has_it(ranks: int) -> None:
    case = a_pingpong(ranks, "bidirectional", None)
    peers = [pairs.peer_of(case, rank) for rank in range(ranks)]
    assert sorted(peers) == list(range(ranks))
    assert all(peers[peer] == rank != peer for rank, peer in enumerate(peers))
    assert sum(pairs.goes_first(case, rank) for rank in range(ranks)) == ranks // 2


@pytest.mark.parametrize("pattern", vocabulary.PATTERNS)
@pytest.mark.parametrize("pair", [(0, 2), (2, 1)])
def test_the_sender_and_the_receiver(pattern: str, pair: pairs.Pair) -> None:
    case = a_pingpong(4, pattern, pair)
    both = set(pair) if pattern != "one_way" else None
    assert {r for r in range(4) if pairs.sends(case, r)} == (both or {pair[0]})
    assert {r for r in range(4) if pairs.receives(case, r)} == (both or {pair[1]})
    for rank in range(4):
        shape = cases.layout(case, rank)
        assert (shape.x is not None, shape.out is not None) == (
            pairs.sends(case, rank),
            pairs.receives(case, rank),
        )
        assert pairs.takes_part(case, rank) == (rank in pair)
    assert [pairs.place_alone(case, rank) for rank in pair] == [0, 1]
    assert pairs.place_alone(case, 3) is None


def test_the_time_of_a_half_round_trip_is_half_a_call() -> None:
    one = timing.Timed(np.array([0, 0]), np.array([4000, 8000]))
    other = timing.Timed(np.array([100, 0]), np.array([3000, 9000]))
    for pattern, expected in (("half_round_trip", [2.0, 4.5]), ("one_way", [4.0, 9.0])):
        calls = pairs.messages(a_pingpong(3, pattern, (0, 1)))
        samples, skews = timing.combine([one, other, timing.NOT_TIMED], calls)
        assert samples == expected
        assert skews == [0.1, 0.0]


@pytest.mark.parametrize("pair", [(2, 0), None])
@pytest.mark.parametrize("pattern", vocabulary.PATTERNS)
def test_a_message_that_does_not_arrive_is_seen(pattern: str, pair: pairs.Pair | None) -> None:
    case = a_pingpong(4, pattern, pair)
    placed = [Pools([case], rank).place(case) for rank in range(4)]
    expected = [verify.expectation(case, rank, 5, True) for rank in range(4)]
    for mine, wanted in zip(placed, expected, strict=True):
        verify.arrange(mine, wanted)
    for rank, mine in enumerate(placed):
        peer = pairs.peer_of(case, rank)
        receives = mine.buffers.out is not None
        assert (verify.inspect(case, mine, expected[rank]) is not None) == receives
        if receives and peer is not None:
            mine.buffers.out[...] = placed[peer].buffers.x
        assert verify.inspect(case, mine, expected[rank]) is None


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("pingpong --ranks 2 --pattern both", "choose from half_round_trip, one_way, bidirectional"),
        ("pingpong --ranks 1", "needs two ranks"),
        ("pingpong --ranks 3 --pairs halves", "even number of ranks, not 3"),
        ("pingpong --ranks 2 --pairs 0-2", "the ranks are 0 to 1"),
        ("pingpong --ranks 2 --pairs 1-1", "no pair"),
        ("pingpong --ranks 2 --pairs 0", "write all, halves, or pairs"),
        ("all_reduce --pattern one_way", "unisono bench pingpong"),
        ("all_reduce --pairs 0-1", "unisono bench pingpong"),
        ("all_to_all --streams two", "choose from own, one, per-peer"),
        ("all_reduce --streams one", "unisono bench all_to_all"),
        ("pingpong --device cuda --to-memory-limit", "leave pingpong out"),
    ],
)
def test_impossible_options_are_refused(arguments: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert result.exit_code == finish.USAGE
    assert says in " ".join(result.stderr.split())


class Collectives(Backend):
    """A user's backend without sends."""

    name = "collectives"

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        raise AssertionError("it is not asked")


class Sends(Collectives):
    name, point_to_point = "sends", True


def test_a_backend_without_sends_is_left_out_in_words() -> None:
    built = cases.point_to_point(cases.make_case("all_to_all", 64, "f32", 2), (), (), vocabulary.STREAMS)
    assert [case.streams for case in built] == [None, "one", "per-peer"]
    wanted = [(case, None) for case in [*built[1:], a_pingpong(2, "one_way", (0, 1))]]
    groups, skipped = make_groups(wanted, [Collectives(), Sends()])
    assert [(group.backend.name, group.works[0].case.streams) for group in groups] == [
        ("sends", "one"),
        ("sends", None),
    ]
    reasons = {(name, case.streams): reason for name, case, reason in skipped}
    assert "no sends and receives" in reasons["collectives", "one"]
    assert "have no streams" in reasons["sends", "per-peer"]


def test_calls_built_of_sends_have_no_in_place_form() -> None:
    case = cases.make_case("all_to_all", 64, "f32", 2, placement="in_place")
    assert cases.point_to_point(case, (), (), vocabulary.STREAMS) == [case]


# ---- runs


def test_a_pair_starts_together_and_the_others_sleep() -> None:
    """Rank 2 takes no part, and nobody waits for it. Rank 1 comes late, and rank 0 leaves only after that."""
    doors, communicators = meetings(3), unisono.init_threads(3)

    def rank(number: int) -> tuple[float, float]:
        mine = communicators[number]
        aligner = Aligner(Control(doors[number]), mine.barrier, partial(meeting, mine))
        aligner()
        arrived = left = 0.0
        if number < 2:
            start = aligner.with_peer(1 - number)
            for _ in range(3):
                if number == 1:
                    time.sleep(0.01)
                arrived = time.monotonic()
                start()
                left = time.monotonic()
        aligner()
        return arrived, left

    with ThreadPoolExecutor(3) as pool:
        (_, left), (arrived, _), _ = pool.map(rank, range(3))
    assert left >= arrived


@pytest.mark.parametrize("ranks", [2, 3])
def test_unisono_in_every_pattern_pair_and_way(tmp_path: Path, ranks: int) -> None:
    """The ranks are threads, and all other pairs sleep."""
    changes: dict[str, Any] = {"collectives": ["pingpong", "all_to_all"], "streams": vocabulary.STREAMS}
    chosen = options(tmp_path / "run", ["unisono"], sizes=[4, 70000], **changes)

    def session_of(control: Control, align: Any, measured: Any) -> Session:
        aligner = Aligner(control, align.barrier, partial(meeting, align))
        device = HostDevice(aligner, aligner.with_peer, control.rank)
        return Session(chosen, control, measured, Interrupt(), "threads", device)

    found, _ = run_session(chosen, ranks, session_of)
    assert [failure.message for failure in found.failures] == []
    both = [result for result in found.results if result.case.collective == vocabulary.PINGPONG]
    # sizes x memories x modes
    assert len(both) == ranks * (ranks - 1) // 2 * len(vocabulary.PATTERNS) * 2 * 2 * 2
    assert {result.case.streams for result in found.results} == {None, "one"}
    assert all(result.verification.before and result.verification.after for result in found.results)
    assert len({result.algorithm for result in found.results}) > 1
    (of_all,) = {result.ceiling_gbps for result in found.results if result not in both}
    assert of_all is not None
    (of_pairs,) = {result.ceiling_gbps for result in both}
    assert of_pairs == pytest.approx(of_all * ranks / 2)


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_all_backends_send_the_right_messages(tmp_path: Path) -> None:
    words = "pingpong all_to_all --streams own,one,per-peer --ranks 3 --sizes 8,100K -d bf16 -n 2"
    command = [sys.executable, "-m", "unisono", "bench", *words.split(), "--no-report"]
    done = subprocess.run(
        [*command, "-O", str(tmp_path / "run")], capture_output=True, text=True, timeout=500, check=False
    )
    found = records.read(tmp_path / "run")
    assert [failure.message for failure in found.failures] == []
    assert done.returncode == 0, done.stderr
    for backend in ("unisono", "mpi", "gloo"):
        own = [result.case for result in found.results if result.backend == backend]
        assert len(own) == (3 * 3 + 2) * 2 * 2
        assert all(skip.case and skip.case.streams == "per-peer" for skip in found.skips)
