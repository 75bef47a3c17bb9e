"""Tests pinned and GPU memory of the fabric lane. The ranks are threads of this process. They may share a
GPU, since no kernel of the lane waits for a peer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
import unisono
from threads import attempt, together
from unisono.communicator import Communicators, _of_threads

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.fabric]
NO_CUDA = "Function not implemented"  # the error of a libfabric that was built without CUDA
KEPT_BYTES = 64 << 20


def offered() -> list[Any]:
    try:
        return unisono.fabric_providers()
    except unisono.ResourceError:
        return []


NAMES = [one.name for one in offered()]
WITH_GPU = [one.name for one in offered() if one.device_memory]


def made(n: int, provider: str, policy: str = "round-robin", channels: int = 1) -> Communicators:
    """Returns `n` ranks, on as many GPUs as there are."""
    here = unisono.device_count()
    if here == 0:
        pytest.skip("CUDA sees no GPU")
    lane = unisono.Fabric(provider, channels=channels, policy=policy)
    comms = Communicators()
    try:
        comms = _of_threads([rank % here for rank in range(n)], 30.0, True, fabric=lane)
        comms.empty(1, np.uint8)
    except unisono.ResourceError as error:
        for comm in comms:
            comm.close()
        if NO_CUDA not in str(error) and "threads of one process" not in str(error):
            raise
        pytest.skip(str(error))
    return comms


@pytest.fixture(params=WITH_GPU)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(provider: str) -> Iterator[Communicators]:
    comms = made(2, provider)
    yield comms
    for comm in comms:
        comm.close()


def blocks(n: int, rank: int, count: int, lap: int) -> Any:
    return np.random.default_rng([lap, rank, count]).integers(0, 256, (n, count), np.uint8)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("policy", "channels"), [("single", 1), ("multi", 3), ("round-robin", 2)])
def test_all_to_all_of_gpu_memory(provider: str, n: int, policy: str, channels: int) -> None:
    comms = made(n, provider, policy, channels)
    most, guard = 300_007, 64

    def body(comm: Any) -> None:
        me = comm.rank
        x, out = (comm.empty(n * most + guard, torch.uint8, device="cuda") for _ in range(2))
        stream = torch.cuda.Stream(comm.device)
        with torch.cuda.stream(stream):
            for lap, count in enumerate((0, 1, 13, 4099, most)):
                mine = blocks(n, me, count, lap)
                there = torch.from_numpy(mine.reshape(-1)).to(x.device)
                torch.cuda._sleep(20_000_000)  # cycles: the NIC must wait for the work that follows
                out.fill_(0xA5)
                x[: n * count].copy_(there)
                comm.all_to_all(x[: n * count].view(n, count), out[: n * count].view(n, count))
                got = out[: n * count].clone().cpu().numpy().reshape(n, count)
                assert all((got[p] == blocks(n, p, count, lap)[me]).all() for p in range(n))
                assert (x[: n * count].cpu().numpy() == mine.reshape(-1)).all()
                assert bool((out[n * count :] == 0xA5).all())

    together(comms, body)
    for comm in comms:
        comm.close()


def test_refused_calls_of_all_to_all_of_gpu_memory(pair: Communicators) -> None:
    def body(comm: Any) -> list[str]:
        x, out = (comm.empty((2, 64), torch.uint8, device="cuda") for _ in range(2))
        other = torch.zeros((2, 64), dtype=torch.uint8, device=f"cuda:{comm.device}")
        wrong = [
            lambda: comm.all_to_all(x, x),
            lambda: comm.all_to_all(other, out),
            lambda: comm.all_to_all(x, other),
            lambda: comm.all_to_all(x, out, algorithm="push"),
            lambda: comm.all_reduce(x),
        ]
        return [str(attempt([comm], lambda _, call=call: call())[0]) for call in wrong]

    for texts in together(pair, body):
        for text, words in zip(
            texts, (*["Communicator::empty"] * 3, "only direct", "no all_reduce of GPU memory"), strict=True
        ):
            assert words in text


def test_a_call_on_gpu_memory_is_not_captured(provider: str) -> None:
    (comm,) = made(1, provider)
    x, out = (comm.empty((1, 64), torch.uint8, device="cuda") for _ in range(2))
    with pytest.raises(unisono.UsageError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.zero_()  # torch warns of an empty graph
        comm.all_to_all(x, out)
    comm.close()


def test_gpu_memory_comes_back(pair: Communicators) -> None:
    def free() -> int:
        return sum(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))

    def body(comm: Any) -> None:
        for _ in range(8):
            comm.empty(256 << 20, torch.uint8, device="cuda")
        comm.empty(1, torch.uint8, device="cuda")  # the lane frees dropped memory

    together(pair, body)
    before = free()
    together(pair, body)
    assert before - free() <= KEPT_BYTES


@pytest.mark.parametrize("provider", NAMES)
def test_pinned_host_memory(provider: str) -> None:
    if unisono.device_count() == 0:
        pytest.skip("CUDA sees no GPU")
    torch.cuda.init()  # before this, torch calls no memory pinned
    comms = unisono.init_threads(2, timeout_s=30.0, lane=unisono.Fabric(provider, pinned=True))

    def body(comm: Any) -> None:
        for lap in range(3):
            x, out = (comm.empty((2, 100_003), np.uint8) for _ in range(2))
            assert not x.any() and not out.any()
            assert torch.from_numpy(x).is_pinned() and torch.from_numpy(out).is_pinned()
            x[:] = blocks(2, comm.rank, 100_003, lap)
            comm.all_to_all(x, out, algorithm="direct")
            assert all((out[p] == blocks(2, p, 100_003, lap)[comm.rank]).all() for p in range(2))

    together(comms, body)
    for comm in comms:
        comm.close()


def test_a_gpu_that_is_not_there(provider: str) -> None:
    made(1, provider)[0].close()
    with pytest.raises(unisono.UsageError, match="not among the"):
        unisono.init(0, 1, device=1000, lane=unisono.Fabric(provider))


def test_bench_on_pinned_and_gpu_memory(tmp_path: Path) -> None:
    pytest.importorskip("msgspec", reason="the bench needs msgspec: put its wheel into .whl")
    from unisono import records
    from unisono.bench.backends.fabric import WAYS

    if unisono.device_count() < 2 or "shm" not in NAMES:
        pytest.skip(f"needs 2 GPUs and provider shm: CUDA sees {unisono.device_count()}")
    folder = tmp_path / "run"
    argv = [sys.executable, "-m", "unisono", "bench", "all_to_all", "--fabric", "--provider", "shm"]
    argv += ["--ranks", "2", "--sizes", "64K,1M", "-n", "3", "--backends", "fabric", "-O", str(folder)]
    ended = ranks.run(argv, timeout_s=240)
    assert ended.code == 0, str(ended)
    found = records.read(folder)
    left_out = {skip.backend: skip.reason for skip in found.skips}
    assert all("-dma" in name and "refused" in reason for name, reason in left_out.items())
    for way in WAYS:
        name = f"fabric:{way}"
        results = [result for result in found.results if result.backend == name]
        assert len(results) == (0 if name in left_out else 2)
        for result in results:
            assert result.memory == ("pinned" if "-pin" in way else "device" if "-dma" in way else "host")
            assert result.verification.before and result.verification.after
