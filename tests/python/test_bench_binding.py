"""Where do the calls of a rank run while which library is measured?"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from unisono.bench.backends.gloo import GlooBackend
from unisono.bench.backends.mpi import MpiBackend
from unisono.bench.backends.unisono import UnisonoBackend
from unisono.bench.binding import Binding


def on_a_thread(body: Callable[[], None]) -> None:
    """The affinity is the thread's: that of the tests stays as it is."""
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
        cores = sorted(os.sched_getaffinity(0))
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
    assert [Binding.core_of(rank, n, n) for rank in range(n)] == cores
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
