"""Registered GPU memory: the bits of calls on it, views, graphs, closing, and what CUDA does not share."""

from __future__ import annotations

import gc
import weakref
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import ranks as processes
import unisono
from gpu_cases import ALL, check, direct_algorithms
from gpus import Gpus, devices_for, gpus, numbers, random_bits
from reference import combine, difference

pytestmark = pytest.mark.gpu
COUNTS = (0, 1, 1000, 12_289, 300_007)
WAYS = {"vmm": {}, "ipc": {"UNISONO_CUDA_MEMORY": "ipc"}, "host": {"UNISONO_PEER_ACCESS": "0"}}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Any:
    with gpus(request.param) as made:
        yield made


def tensors(ranks: Gpus, size: int) -> list[Any]:
    import torch

    return [torch.empty(size, dtype=torch.uint8, device=device) for device in ranks.devices]


def register(ranks: Gpus, given: list[Any]) -> list[unisono.Registration]:
    return ranks.comms.each(lambda comm: comm.register(given[comm.rank]))


def close(ranks: Gpus, registrations: list[unisono.Registration]) -> None:
    ranks.comms.each(lambda comm: registrations[comm.rank].close())


@pytest.mark.parametrize("collective", ALL)
@pytest.mark.parametrize("begin", [0, 16, 20])
def test_bits(ranks: Gpus, collective: str, begin: int) -> None:
    """Views at any place of registered tensors, by every algorithm that reaches into peers' memory."""
    pools = [tensors(ranks, 4 << 20) for _ in range(2)]
    registrations = [register(ranks, pool) for pool in pools]
    views = [[tensor[begin:] for tensor in pool] for pool in pools]
    for count in COUNTS:
        for algorithm in [None, *(direct_algorithms(collective, ranks.n) if ranks.reach else [])]:
            check(ranks, collective, count, "f32", "sum", algorithm, views)
    for one in registrations:
        close(ranks, one)


def test_direct_while_registered(ranks: Gpus) -> None:
    """Before and after, direct is refused; registered again, it runs. The tensors live as long as that."""
    if not ranks.reach:
        pytest.skip("the GPUs do not reach each other's memory")
    given = tensors(ranks, 1 << 20)
    kept = [weakref.ref(tensor) for tensor in given]

    def call(comm: Any, r: int, stream: Any) -> Any:
        whole = kept[r]()
        return comm.all_reduce(whole[:4096], out=whole[4096:8192], algorithm="two_shot_push", stream=stream)

    for _ in range(2):
        with pytest.raises(unisono.UsageError, match="two_shot_push needs registered buffers, or buffers"):
            call(ranks.comms[0], 0, ranks.streams[0])
        registrations = register(ranks, given)
        for tensor in given:
            tensor.fill_(2)
        for out in ranks.run(call):
            assert (out == 2 * ranks.n).all()
        close(ranks, registrations)
    last = register(ranks, given)
    del given, out, tensor
    gc.collect()
    assert all(one() is not None for one in kept)
    close(ranks, last)
    gc.collect()
    assert all(one() is None for one in kept)


def test_graph(ranks: Gpus) -> None:
    """A graph of calls on registered tensors, replayed on other data."""
    rng, count = np.random.default_rng(1), 50_000
    xs = [ranks.put(np.zeros(count, np.float32), r) for r in range(ranks.n)]
    outs = [ranks.put(np.zeros(count, np.float32), r) for r in range(ranks.n)]
    registrations = [register(ranks, xs), register(ranks, outs)]
    algorithm = "two_shot_push" if ranks.reach else None
    graphs = ranks.capture(
        lambda comm, r: comm.all_reduce(xs[r], out=outs[r], algorithm=algorithm, stream=ranks.streams[r])
    )
    for _ in range(3):
        fresh = [random_bits(rng, (count,), "f32") for _ in range(ranks.n)]
        ranks.replay(graphs, xs, fresh)
        for r in range(ranks.n):
            assert difference(numbers(outs[r], "f32"), combine(fresh, "sum")) is None
    del graphs
    for one in registrations:
        close(ranks, one)


def test_memory_of_empty_is_refused(ranks: Gpus) -> None:
    if not ranks.reach:
        pytest.skip("the GPUs do not reach each other's memory")
    symmetric = ranks.comms.empty(1000, "f32")
    with pytest.raises(unisono.UsageError, match="is symmetric memory already"):
        register(ranks, symmetric)
    with pytest.raises(unisono.UsageError, match="is symmetric memory already"):
        register(ranks, [one[10:] for one in symmetric])


def test_host_arrays_beside(ranks: Gpus) -> None:
    """A communicator with GPUs registers arrays of the host too, the same kind on every rank."""

    def body(comm: Any) -> float:
        x = np.ones(1000, np.float32)
        with comm.register(x):
            return float(comm.all_reduce(x)[0])

    assert ranks.comms.each(body) == [ranks.n] * ranks.n


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("n", "dtype"), [(2, "f32"), (3, "bf16")])
def test_processes(n: int, dtype: str, way: str) -> None:
    devices_for(n)
    found = processes.play(
        n, "gpu_registration_programs:collectives", dtype, env=WAYS[way], timeout_s=240
    ).results()
    assert [one["wrong"] for one in found] == [[]] * n
    assert {one["peer_access"] for one in found} == {way != "host"}
    assert min(one["made"] for one in found) >= 24


@pytest.mark.parametrize("n", [2, 3])
def test_two_tensors_of_one_segment(n: int) -> None:
    devices_for(n)
    for said in processes.play(n, "gpu_registration_programs:one_segment", timeout_s=120).results():
        assert 0 < said["apart"] < 2 << 20, "they are not of one allocation"
        assert said["wrong"] == []
        for when in ("before", "between"):
            assert "direct needs registered buffers" in said[when]["error"]["text"]
        assert said["alive"] and said["gone"]


def test_refusals() -> None:
    """On every rank, in the words of the one whose memory cannot be shared; the communicator goes on."""
    devices_for(2)
    who = "rank 1 cannot register its memory: "
    words = {
        "strides": who + "x is not contiguous",
        "shorter": "rank 0 registers 4000 bytes, but rank 1 3996",
        "host": "some ranks register memory of the host, others of a GPU",
    }
    if find_spec("cupy") is not None:
        words["managed"] = who + "it is managed memory, which peers cannot map"
        words["pool"] = who + "CUDA does not share it with other processes"
    found = processes.play(2, "gpu_registration_programs:refused", list(words), timeout_s=120).results()
    for said in found:
        for kind, text in words.items():
            assert said[kind]["text"].startswith(text), said[kind]
            assert said[kind]["type"] == ("ResourceError" if kind == "pool" else "UsageError")
        assert (said["sum"], said["bytes"]) == (2, 4000)
        assert "overlaps memory that is registered" in said["overlap"]["text"]


def test_expandable_segments() -> None:
    devices_for(2)
    env = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")
    played = processes.play(2, "gpu_registration_programs:expandable", env=env, timeout_s=120)
    for said in played.results():
        assert said["first"]["error"]["type"] == "ResourceError", said
        assert "torch's expandable segments: use memory of cudaMalloc" in said["first"]["error"]["text"]
        assert said["sum"] == 2
