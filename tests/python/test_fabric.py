"""The fabric lane between processes: the host lane's sums, and ranks that die, stay away, stop or leave while
writes are in flight."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fabric
import hosts
import ranks
import unisono
from faults import NOTICED_S, assert_lost, assert_nothing_left, error_of
from unisono import records
from unisono.bench.backends.fabric import WAYS

pytestmark = pytest.mark.fabric
PROVIDERS = ("shm", "tcp", "tcp;ofi_rxm", "sockets", "udp;ofi_rxd")
# whose ranks are noticed to be gone by their process, as on any provider, in the middle of large writes
FAULTY = ("shm", "tcp")


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    return _present(request)


@pytest.fixture(params=FAULTY)
def faulty(request: pytest.FixtureRequest) -> str:
    return _present(request)


def _present(request: pytest.FixtureRequest) -> str:
    if reason := fabric.missing(request.param):
        pytest.skip(reason)
    return str(request.param)


@pytest.mark.parametrize("n", [2, 4])
def test_same_bits_as_the_host_lane(provider: str, n: int) -> None:
    env = {"UNISONO_FABRIC_SHARE": "100000"}  # so that policy multi splits
    for result in ranks.play(n, "fabric_programs:same_bits", provider, env=env, timeout_s=120).results():
        assert result["different"] == []
        assert result["calls"] > 100


def test_small_chunks(faulty: str) -> None:
    """The ranks' tickets of a call still fit into a chunk."""
    env = fabric.over(faulty, UNISONO_CHUNK_BYTES="64", UNISONO_CHECK="1")
    for errors in ranks.play(3, "fabric_programs:allocations", 20, env=env).results():
        assert errors == []


@pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or "")
@pytest.mark.parametrize("provider", ["tcp", "tcp;ofi_rxm"], indirect=True)
def test_ranks_that_rest_between_calls_over_full_sockets(provider: str) -> None:
    """A rank's last messages of a call reach its peers, though the rank then stays out of libfabric."""
    narrow = 'for most in /proc/sys/net/ipv4/tcp_[rw]mem; do echo 4096 4608 4608 >$most; done; exec "$@"'
    with hosts.hosts(1) as made:
        within = ["ip", "netns", "exec", made.name(1), "sh", "-c", narrow, "sh"]
        outcome = ranks.play_by(
            lambda argv: ranks.launch(4, argv, within=within), 4, "fabric_programs:rest", provider, 200
        )
    assert outcome.results() == [[]] * 4


@pytest.mark.parametrize("provider", ["tcp", "tcp;ofi_rxm", "shm"], indirect=True)
def test_ranks_that_are_done_may_leave_a_slow_root(provider: str) -> None:
    outcome = ranks.play(4, "fabric_programs:slow_root", env=fabric.over(provider))
    assert outcome.results() == [None] * 4


@pytest.mark.parametrize(
    ("what", "memory", "check", "victim"),
    [
        ("barrier", "plain", False, 1),
        ("all_reduce staged", "plain", False, 0),
        ("all_to_all", "symmetric", False, 1),
        ("all_to_all_v", "plain", True, 1),
        ("empty", "plain", False, 0),
    ],
)
def test_kill_inside_a_call(faulty: str, what: str, memory: str, check: bool, victim: int) -> None:
    marker = ranks.new_marker()
    outcome = ranks.play(
        3, "fault_programs:killed_inside", what, memory, check, victim, env=fabric.over(faulty, **marker)
    )
    assert outcome.ranks[victim] is None
    _assert_noticed(outcome, faulty, victim)
    assert_nothing_left(outcome, marker["UNISONO_TEST"])


def test_kill_with_writes_in_flight(faulty: str) -> None:
    marker = ranks.new_marker()
    env = fabric.over(faulty, UNISONO_CHECK="0", **marker)
    outcome = ranks.play(4, "fabric_programs:killed_in_writes", 0.4, env=env)
    _assert_noticed(outcome, faulty, victim=3)
    assert_nothing_left(outcome, marker["UNISONO_TEST"])


def _assert_noticed(outcome: ranks.Outcome, provider: str, victim: int) -> None:
    """Checks that the other ranks noticed. Ranks that notice at once have messages of their own. A rank that
    waits for a lock of shm's that the victim held has been ended."""
    stuck = outcome.ranks.count(None) - 1
    deaths = re.findall(rf"rank {victim} \(process \d+\) has died within libfabric", outcome.ended.output)
    assert len(deaths) == stuck, str(outcome.ended)
    assert stuck == 0 or provider == "shm"
    assert_lost(outcome, victim, words="", stuck=stuck)


@pytest.mark.parametrize("what", ["barrier", "all_reduce staged", "all_to_all", "empty"])
def test_rank_that_never_comes(faulty: str, what: str) -> None:
    outcome = ranks.play(3, "fault_programs:never_comes", what, env=fabric.over(faulty))
    *waited, late = outcome.results()
    # A rank that comes after all others have given up may find nobody to say so.
    assert error_of(late["first"])["type"] in ("TimeoutError", "PeerLostError")
    for rank, one in enumerate(waited):
        error = error_of(one["first"])
        assert error["type"] == "TimeoutError", (rank, error)
        assert "has waited 1 s for rank 2" in error["text"]
        assert one["waited"] < NOTICED_S


def _error(body: Any) -> str:
    with pytest.raises(unisono.UsageError) as caught:
        body()
    return str(caught.value)


def test_refusals_name_their_argument(provider: str) -> None:
    text = _error(lambda: unisono.init(0, 1, lane=unisono.Fabric("infinitebrand")))
    assert "'infinitebrand'" in text and unisono.fabric_provider(provider).name in text
    for channels in (0, 1000):
        text = _error(lambda: unisono.init(0, 1, lane=unisono.Fabric(provider, channels=channels)))  # noqa: B023
        assert f"{channels} channels" in text and "gives 1 to " in text
    assert "round-robin" in _error(lambda: unisono.Fabric(provider, policy="both"))
    assert "host, fabric" in _error(lambda: unisono.init(0, 1, lane="smoke"))
    with unisono.init(0, 1, lane=unisono.Fabric(provider)) as comm:
        assert "push" in _error(lambda: comm.all_gather(np.zeros(4, np.uint8), algorithm="push_packets"))
        assert "wire" in _error(lambda: comm.all_reduce(np.zeros(4, np.float32), wire="fp8"))
    if unisono.device_count() == 0:
        for options in (
            {"lane": unisono.Fabric(provider, pinned=True)},
            {"device": 0, "lane": unisono.Fabric(provider)},
        ):
            with pytest.raises(unisono.ResourceError, match="which pinned and GPU memory need"):
                unisono.init(0, 1, **options)  # type: ignore[arg-type]
    for seconds in (float("nan"), float("inf"), -1.0):
        lane = unisono.Fabric(provider)
        text = _error(lambda: unisono.init_threads(2, timeout_s=seconds, lane=lane))  # noqa: B023
        assert "no deadline" in text


def test_shm_names_no_file_after_a_process() -> None:
    """A killed process leaves its files, and another process may get its number."""
    if reason := fabric.missing("shm"):
        pytest.skip(reason)
    before = _shm_files(Path("/proc/self/maps").read_text())
    with unisono.init(0, 1, lane=unisono.Fabric("shm", channels=2)):
        names = _shm_files(Path("/proc/self/maps").read_text()) - before
        assert len(names) == 2
        assert not any(name.startswith(f"{os.getpid()}:") for name in os.listdir("/dev/shm"))
    assert not any(Path(name).exists() for name in names)


def _shm_files(maps: str) -> set[str]:
    """Returns the files of our endpoints that a process has mapped."""
    return set(re.findall(r"/dev/shm/unisono-\S+", maps))


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_shm_files_of_the_dead_are_removed(end: str) -> None:
    """The next process that uses shm removes them, but no files of living processes."""
    if reason := fabric.missing("shm"):
        pytest.skip(reason)
    program = "import os, unisono; lane = unisono.Fabric('shm', channels=2)\n"
    program += "with unisono.init(0, 1, lane=lane): print(open('/proc/self/maps').read(), flush=True); "
    before = _shm_files(Path("/proc/self/maps").read_text())
    with unisono.init(0, 1, lane=unisono.Fabric("shm")):
        mine = _shm_files(Path("/proc/self/maps").read_text()) - before
        left = _shm_files(ranks.run([sys.executable, "-c", program + end]).output)
        assert mine and len(left) == 2 and not mine & left
        assert ranks.run([sys.executable, "-c", program]).code == 0
        assert not any(Path(one).exists() for one in left)
        assert all(Path(one).exists() for one in mine)


def test_one_address_on_two_machines() -> None:
    """Bridges of containers may have the same address. Refused, as neither rank would reach the other."""
    if reason := fabric.missing("tcp"):
        pytest.skip(reason)

    class Twin:
        """A bootstrap for rank 0 of two. The other rank has the same address, but another boot id."""

        rank, size = 0, 2

        def all_gather(self, data: bytes) -> list[bytes]:
            other = bytearray(data)
            if data.startswith(b"unisono-fabric"):
                other[16] = 1  # Greeting::rank
                other[48] ^= 1  # Greeting::boot
            return [data, bytes(other)]

        def close(self) -> None:
            pass

    with pytest.raises(unisono.UsageError, match="set FI_TCP_IFACE"):
        unisono.init(bootstrap=Twin(), lane=unisono.Fabric("tcp"))


def test_other_settings_on_another_rank(faulty: str) -> None:
    texts = [error["text"] for error in ranks.play(2, "fabric_programs:other_channels", faulty).errors()]
    assert all("set them the same on every rank" in text for text in texts)


def test_bench_measures_every_way_or_says_why_not(tmp_path: Path) -> None:
    if reason := fabric.missing("tcp"):
        pytest.skip(reason)
    folder = tmp_path / "run"
    argv = [sys.executable, "-m", "unisono", "bench", "all_to_all", "--fabric", "--provider", "tcp"]
    argv += ["--ranks", "4", "--sizes", "64K,1M", "-n", "3", "--backends", "fabric", "-O", str(folder)]
    ended = ranks.run(argv, timeout_s=120)
    assert ended.code == 0, str(ended)
    found = records.read(folder)
    assert {(r.backend, r.case.bytes) for r in found.results} == {
        (f"fabric:{way}", size) for way in ("single", "multi", "round-robin") for size in (64 << 10, 1 << 20)
    }
    for result in found.results:
        assert result.verification.before and result.verification.after
        assert result.verification.bound == "bit-exact"
        assert result.ceiling_gbps is not None
        assert result.memory == "host"
    pair = [ceiling for ceiling in found.ceilings if ceiling.name == "fabric_pair"]
    assert len(pair) == 2 and all(ceiling.gbps > 0 for ceiling in pair)
    left_out = {skip.backend: skip.reason for skip in found.skips}
    assert set(left_out) == {f"fabric:{way}" for way in WAYS if "-pin" in way or "-dma" in way}
    assert all("GPU" in reason for reason in left_out.values())
    text = (folder / "report.md").read_text()
    table = text[text.index("## Fabric") :]
    assert "Of a pair's share" in table
    for way in ("single", "multi", "round-robin"):
        assert table.count(f"fabric:{way}") >= 2


def test_info_and_the_refusal_of_a_provider_list_the_same() -> None:
    """Both list the same providers, also beside MPI, which brings a libfabric of its own."""
    if reason := fabric.missing("tcp"):
        pytest.skip(reason)
    refusal = fabric.missing("infinitebrand")
    assert refusal is not None
    providers = refusal.partition("use one of ")[2].rstrip(".")
    ended = ranks.run([sys.executable, "-m", "unisono", "info"], env={"COLUMNS": "300"}, timeout_s=120)
    listed = re.search(r"^fabric lane +libfabric [\d.]+: (.*?) *$", ended.output, re.MULTILINE)
    assert listed, str(ended)
    assert re.sub(r" \([^)]*\)", "", listed[1]) == providers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--provider", "infinitebrand"], "'infinitebrand'"),
        (["--channels", "0"], "gives 1 to "),
        (["--channels", "1000"], "gives 1 to "),
        (["--device", "cuda"], "--fabric"),
        (["--ranks", "1"], "give --ranks 2 or more"),
    ],
)
def test_bench_refuses(options: list[str], words: str) -> None:
    if reason := fabric.missing("tcp"):
        pytest.skip(reason)
    provider = [] if "--provider" in options else ["--provider", "tcp"]
    argv = [sys.executable, "-m", "unisono", "bench", "all_to_all", "--fabric", *provider, *options]
    ended = ranks.run(argv)
    assert ended.code == 2, str(ended)
    assert words in ended.output
