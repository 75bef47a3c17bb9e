"""The cores on which a rank's calls run while a library is measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono.bench import binding
from unisono.bench.backends.gloo import GlooBackend
from unisono.bench.backends.mpi import MpiBackend
from unisono.bench.backends.unisono import UnisonoBackend
from unisono.bench.binding import Binding, parse_cpulist, spread
from unisono.bench.cuda import device


def on_a_thread(body: Callable[[], None]) -> None:
    """Runs `body` on a thread of its own, so that the affinity of the tests' thread stays."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(body).result()


def test_a_rank_has_its_core_except_while_a_library_with_threads_is_measured() -> None:
    def body() -> None:
        everywhere = os.sched_getaffinity(0)
        core = max(everywhere)
        binding = Binding(core)
        assert os.sched_getaffinity(0) == everywhere
        for backend, cores in ((UnisonoBackend, {core}), (GlooBackend, everywhere), (MpiBackend, {core})):
            binding.bind(backend.own_threads)
            assert os.sched_getaffinity(0) == cores

    on_a_thread(body)


def test_without_a_core_of_its_own_a_rank_stays_where_its_launcher_put_it() -> None:
    def body() -> None:
        everywhere = os.sched_getaffinity(0)
        Binding(None).bind(own_threads=False)
        assert os.sched_getaffinity(0) == everywhere

    on_a_thread(body)


def test_two_that_work_alone_have_a_core_each_where_not_all_can() -> None:
    def body() -> None:
        cores = spread(os.sched_getaffinity(0))
        binding = Binding(None)
        for place, core in enumerate(cores[:2]):
            binding.bind(own_threads=False, alone=place)
            assert os.sched_getaffinity(0) == {core}
        for own_threads, alone in ((True, 0), (False, None), (False, len(cores))):
            binding.bind(own_threads, alone)
            assert os.sched_getaffinity(0) == set(cores)
        own = Binding(cores[-1])
        own.bind(own_threads=False, alone=0)
        assert os.sched_getaffinity(0) == {cores[-1]}

    on_a_thread(body)


def test_cores_are_given_where_every_rank_can_have_one() -> None:
    cores = sorted(os.sched_getaffinity(0))
    n = len(cores)
    assert sorted(Binding.core_of(rank, n, n) or 0 for rank in range(n)) == cores
    assert Binding.core_of(0, n + 1, n + 1) is None
    assert Binding.core_of(0, 1, 2) is None  # the other is on another machine


def test_on_gpus_a_rank_has_an_equal_share_of_the_cores() -> None:
    cores = os.sched_getaffinity(0)
    assert Binding.share_of(0, 1, 1) == cores
    n = len(cores)
    shares = [Binding.share_of(rank, n, n) for rank in range(n)]
    assert sorted(core for share in shares for core in share or ()) == sorted(cores)
    assert Binding.share_of(0, n + 1, n + 1) is None

    def body() -> None:
        Binding(frozenset(cores)).bind(own_threads=False)
        assert os.sched_getaffinity(0) == cores

    on_a_thread(body)


@pytest.fixture(params=["beside", "behind"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Returns the physical core of a CPU, on 4 cores of 2 hyperthreads: 0,1 2,3 ... or 0,4 1,5 ..."""

    def core(cpu: int) -> int:
        return cpu // 2 if request.param == "beside" else cpu % 4

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(binding, "siblings", lambda cpu: str(core(cpu)))
    return core


def test_ranks_have_no_hyperthread_of_anothers_core_while_there_are_cores(
    threads: Callable[[int], int],
) -> None:
    for size in (2, 3, 4):
        cpus = [Binding.core_of(rank, size, size) for rank in range(size)]
        assert len({threads(cpu) for cpu in cpus if cpu is not None}) == size
        shares = [Binding.share_of(rank, size, size) or frozenset() for rank in range(size)]
        physical = [threads(cpu) for share in shares for cpu in share]
        assert len(physical) == 8 // size * size
        assert sum(len({threads(cpu) for cpu in share}) for share in shares) == len(set(physical))
    assert sorted(Binding.core_of(rank, 8, 8) or 0 for rank in range(8)) == list(range(8))
    assert len({threads(cpu) for cpu in spread(range(8))[:2]}) == 2  # for two ranks that work alone


def test_a_ranks_share_lies_near_its_gpu(threads: Callable[[int], int]) -> None:
    low, high = (frozenset(cpu for cpu in range(8) if threads(cpu) // 2 == node) for node in range(2))
    near = [high, low, low, high]
    shares = [Binding.share_of(rank, 4, 4, near) or frozenset() for rank in range(4)]
    assert all(len(share) == 2 and share <= cpus for share, cpus in zip(shares, near, strict=True))
    assert frozenset().union(*shares) == low | high
    plain = [Binding.share_of(rank, 4, 4) for rank in range(4)]
    for useless in ([], near[:3], [frozenset({0})] * 4, [low, low | high] * 2, [low, frozenset({99})] * 2):
        assert [Binding.share_of(rank, 4, 4, useless) for rank in range(4)] == plain


def test_where_gpus_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_cpulist("0-2,8\n") == {0, 1, 2, 8}
    assert parse_cpulist("\n") == frozenset()
    for address, cpus in (("0000:1b:00.0", "0-3"), ("0000:9d:00.0", "4-7")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(f"{cpus}\n")
    found = ["0000:1b:00.0", "0000:9d:00.0", "0000:ff:00.0"]
    monkeypatch.setattr(device, "Driver", lambda: SimpleNamespace(pci_address=found.__getitem__))
    assert device.near_gpus(2, tmp_path) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert device.near_gpus(3, tmp_path) == []
