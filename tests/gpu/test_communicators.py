"""Tests streams, memory, plans and deadlines of communicators on GPUs, by calls on a few ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import unisono
from gpu_cases import ALL, check, direct_algorithms
from gpus import Gpus, gpus, numbers, random_bits
from reference import difference
from unisono import traits

pytestmark = pytest.mark.gpu


def test_calls_stay_in_order_around_a_capture() -> None:
    """A call is still under way, the next is captured on another stream, and a third is on another again."""
    import ctypes

    import torch

    from unisono.bench.cuda.runtime import CAPTURE_THREAD_LOCAL, Runtime

    runtime = Runtime(torch.version.cuda)
    with gpus(2, timeout_s=20) as ranks:
        first, captured, last = (
            [ranks.put(np.full(1000, r + 1, "f4"), r) for r in range(2)] for _ in range(3)
        )
        streams = [[torch.cuda.Stream(device) for _ in range(3)] for device in ranks.devices]
        torch.cuda._sleep(1)  # loads the kernel before a GPU waits for another
        for device in ranks.devices:
            torch.cuda.synchronize(device)
        for r, comm in enumerate(ranks.comms):
            a, b, c = streams[r]
            graph = ctypes.c_void_p()
            with torch.cuda.device(ranks.devices[r]):
                if r == 0:
                    with torch.cuda.stream(a):
                        torch.cuda._sleep(1 << 29)  # cycles: rank 1 waits for this rank's first call
                comm.all_reduce(first[r], out=first[r], stream=a)
                runtime("cudaStreamBeginCapture", b.cuda_stream, CAPTURE_THREAD_LOCAL)
                comm.all_reduce(captured[r], out=captured[r], stream=b)
                runtime("cudaStreamEndCapture", b.cuda_stream, ctypes.byref(graph))
                runtime("cudaGraphDestroy", graph)
                comm.all_reduce(last[r], "max", out=last[r], stream=c)
        for comm, rank_streams in zip(ranks.comms, streams, strict=True):
            for stream in rank_streams:
                comm.synchronize(stream)
        assert [x.unique().tolist() for x in (*first, *captured, *last)] == [[3], [3], [1], [2], [2], [2]]


def test_without_peer_access_nothing_is_reached() -> None:
    import torch

    with gpus(2, peer_access=False) as ranks:
        assert [comm.peer_access for comm in ranks.comms] == [False, False]
        planned = {ranks.comms[0].plan(name, 1 << 30, True) for name in ALL}
        assert not any(traits.algorithm(name).direct for name in planned)
        x = ranks.comms.empty(4096, torch.uint8)[0]
        for algorithm in direct_algorithms("all_reduce", 2):
            with pytest.raises(unisono.UsageError, match="needs GPUs with peer access"):
                ranks.comms[0].all_reduce(x, out=x, algorithm=algorithm, stream=ranks.streams[0])
        assert [comm.nvlink for comm in ranks.comms] == [False, False]
        for algorithm in ("one_shot_ll128", "two_shot_ll128"):
            with pytest.raises(unisono.UsageError, match="needs peer access over NVLink"):
                ranks.comms[0].all_reduce(x, out=x, algorithm=algorithm, stream=ranks.streams[0])


def test_dropping_symmetric_memory_waits_for_nothing() -> None:
    """One thread drives both ranks: when rank 0 drops an array, its GPU waits for rank 1's part of a call."""
    import torch

    with gpus(2, timeout_s=10) as ranks:
        old, x = (ranks.comms.empty(1000) for _ in range(2))
        for tensor in x:
            tensor.fill_(1)

        def call(comm: Any, r: int, stream: Any) -> None:
            comm.all_reduce(x[r], out=x[r], stream=stream)
            old[r] = None

        ranks.run(call)
        assert [tensor.unique().tolist() for tensor in x] == [[2.0]] * 2

        size = 256 << 20
        free = [torch.cuda.mem_get_info(device)[0] for device in ranks.devices]
        for _ in range(6):  # the next call of empty frees what was dropped
            ranks.comms.empty(size, torch.uint8)
        kept = max(b - torch.cuda.mem_get_info(d)[0] for b, d in zip(free, ranks.devices, strict=True))
        assert kept < 4 * size  # two ranks may share the GPU


def test_lines_are_chosen_over_nvlink_only() -> None:
    """Both the built-in plan and a plan from another machine take lines over NVLink only."""
    with gpus(2) as ranks:
        if not ranks.reach:
            pytest.skip("nobody is reached")
        nvlink = ranks.comms[0].nvlink
        assert [comm.nvlink for comm in ranks.comms] == [nvlink] * 2
        assert (ranks.comms[0].plan("all_gather", 1 << 20) == "push_ll128") == nvlink
        for comm in ranks.comms:
            comm.set_plan([("all_reduce", False, None, "two_shot_ll128")])
        check(ranks, "all_reduce", 300_007, "f32", "sum", None)


def test_plan_names_the_substitute() -> None:
    """An algorithm is replaced in place, if sums pass through the output or peers overwrite it, and for more
    ranks than it takes."""
    with gpus(3) as ranks:
        if not ranks.reach:
            pytest.skip("nobody is reached")
        comm = ranks.comms[0]
        comm.set_plan([(name, True, None, "copy_engine") for name in ("all_reduce", "reduce", "all_to_all")])
        comm.set_plan([("all_to_all", False, None, "push")])
        planned = {
            name: [comm.plan(name, 1 << 30, True, in_place=way) for way in (False, True)]
            for name in ("all_reduce", "reduce", "all_to_all")
        }
        assert planned == {
            "all_reduce": ["copy_engine", "two_shot_push"],
            "reduce": ["push", "push"],
            "all_to_all": ["copy_engine", "push"],
        }
        comm.set_plan([("gather", False, None, "push_ll128")])
        assert comm.plan("gather", 16 << 30) == "push"  # a line's message is below 2 GiB


def exchange(ranks: Gpus, inputs: Any, counts: Any, outs: Any, algorithm: str | None, batch: bool) -> None:
    """Sends `counts[r][p]` bytes from rank r to rank p, as an all_to_all_v or a batch."""

    def call(comm: Any, r: int, stream: Any) -> None:
        sent, received = counts[r].tolist(), counts[:, r].tolist()
        if batch:
            sends = zip(inputs[r].split(sent), range(ranks.n), strict=True)
            recvs = zip(outs[r].split(received), range(ranks.n), strict=True)
            comm.batch_send_recv(list(sends), list(recvs), stream=stream)
        else:
            comm.all_to_all_v(inputs[r], sent, received, outs[r], algorithm=algorithm, stream=stream)

    ranks.run(call)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("memory", ["plain", "symmetric", "some", "in place", "one in place"])
def test_each_message_goes_by_its_own_size(n: int, memory: str) -> None:
    """Long messages go to the place that their receivers tell, a different one on every rank. The others go
    in packets or lines, in the same call. In place, received data must not overwrite data yet to leave."""
    import torch

    rng = np.random.default_rng(n)
    symmetric = {"plain": [], "some": range(1, n, 2), "one in place": range(1, n)}.get(memory, range(n))
    in_place = {"in place": range(n), "one in place": [0]}.get(memory, [])
    with gpus(n) as ranks:
        if not ranks.reach:
            pytest.skip("nobody is reached")
        rows = [(5000, "push_packets", (0, 0, 0)), (None, "direct", (16, 128, 4096))]
        for comm in ranks.comms:
            comm.set_plan([(name, False, *row) for name in ("all_to_all_v", "send_recv") for row in rows])
            assert [comm.plan("all_to_all_v", size * n) for size in (5001, 1 << 20)] == ["direct"] * 2
            assert comm.plan("all_to_all_v", 5000 * n) != "direct"
        pool = ranks.comms.empty(5 << 20, torch.uint8)
        for most, algorithm in itertools.product((4999, 100_000, 1_000_003), (None, "direct", "push")):
            counts = rng.integers(0, most, (n, n))
            counts[0, n - 1], counts[n - 1, 0] = 0, most
            if in_place:
                counts = np.maximum(counts, counts.T)
            xs = [random_bits(rng, (int(counts[r].sum()),), "u8") for r in range(n)]
            parts = [np.split(xs[r], np.cumsum(counts[r])[:-1]) for r in range(n)]
            wanted = [np.concatenate([parts[s][r] for s in range(n)]) for r in range(n)]
            inputs = [ranks.put(x, r) for r, x in enumerate(xs)]
            for batch in [False] if in_place or algorithm else [False, True]:
                outs = [ranks.put(np.zeros_like(x), r) for r, x in enumerate(wanted)]
                for r in symmetric:
                    outs[r] = pool[r][3 * r : 3 * r + len(wanted[r])]
                    outs[r].zero_()
                for r in in_place:
                    outs[r].copy_(inputs[r])
                sources = [outs[r] if r in in_place else inputs[r] for r in range(n)]
                exchange(ranks, sources, counts, outs, algorithm, batch)
                for out, right in zip(outs, wanted, strict=True):
                    assert difference(numbers(out, "u8"), right) is None


@pytest.mark.parametrize("peer_access", [True, False])
def test_late_rank_is_a_timeout(peer_access: bool) -> None:
    import torch

    with gpus(2, timeout_s=1.0, peer_access=peer_access) as ranks:
        x = torch.ones(1000, device=ranks.devices[0])
        ranks.comms[0].all_reduce(x, out=x, stream=ranks.streams[0])
        with pytest.raises(unisono.TimeoutError, match=r"all_reduce .*rank 0.* on the GPU for rank 1"):
            ranks.comms[0].synchronize(ranks.streams[0])
        with pytest.raises(unisono.TimeoutError):
            ranks.comms[1].all_reduce(torch.ones(1000, device=ranks.devices[1]), stream=ranks.streams[1])
