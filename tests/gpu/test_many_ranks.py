"""More ranks than exchange kernels and copy engines take: every collective by the programs, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import quantised
import ranks as processes
import unisono
from gpu_cases import ALL, MOVING, check, direct_algorithms, plain_algorithms
from gpus import Gpus, devices_for, gpus, numbers, random_bits
from reference import DTYPES, OPS, difference
from unisono import traits

pytestmark = pytest.mark.gpu
COUNTS = (0, 1, 1000, 50_021)  # elements of the larger buffer, or near


@pytest.fixture(
    scope="module",
    params=[(9, True), (12, True), (9, False)],
    ids=lambda way: f"{way[0]}-{'peers' if way[1] else 'host'}",
)
def ranks(request: pytest.FixtureRequest) -> Any:
    """With few blocks a rank: all kernels are resident, also where the ranks share a GPU."""
    n, peer_access = request.param
    with gpus(n, peer_access=peer_access, max_sms=4, timeout_s=20) as made:
        yield made


@pytest.fixture(scope="module")
def pools(ranks: Gpus) -> Any:
    import torch

    return [ranks.comms.empty(1 << 20, torch.uint8) for _ in range(2)]


@pytest.mark.parametrize("collective", ALL)
def test_plain_memory(ranks: Gpus, collective: str) -> None:
    for count in COUNTS:
        for algorithm in plain_algorithms(collective, ranks.nvlink, ranks.n):
            check(ranks, collective, count, "f32", "sum", algorithm)


@pytest.mark.parametrize("collective", ALL)
def test_symmetric_memory(ranks: Gpus, pools: Any, collective: str) -> None:
    for count in COUNTS:
        for algorithm in [None, *(direct_algorithms(collective, ranks.n) if ranks.reach else [])]:
            check(ranks, collective, count, "f32", "sum", algorithm, pools)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_op(ranks: Gpus, dtype: str) -> None:
    for op in OPS:
        check(ranks, "all_reduce", 2003, dtype, op, "two_shot")
    check(ranks, "reduce_scatter", 2003, dtype, "sum", None)
    for collective in MOVING:
        check(ranks, collective, 2003, dtype, "sum", None)


@pytest.mark.parametrize("wire", quantised.WIRES)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_quantised(ranks: Gpus, wire: str, op: str) -> None:
    rng = np.random.default_rng(ranks.n)
    for dtype, count in (("f32", 1), ("bf16", 1000), ("f16", 20_011)):
        xs = [rng.standard_normal(count).astype(DTYPES[dtype]) for _ in range(ranks.n)]
        inputs = [ranks.put(x, r) for r, x in enumerate(xs)]
        outs = ranks.run(
            lambda comm, r, stream, xs=inputs: comm.all_reduce(xs[r], op, wire=wire, stream=stream)
        )
        wanted = quantised.all_reduce(xs, op, wire)
        assert all(difference(numbers(out, dtype), wanted) is None for out in outs), (dtype, count)


def test_messages(ranks: Gpus) -> None:
    """A ring of sends, a size for each pair, and a batch to some."""
    rng, n = np.random.default_rng(2), ranks.n
    xs = [random_bits(rng, (70_001,), "u8") for _ in range(n)]
    inputs = [ranks.put(x, r) for r, x in enumerate(xs)]
    outs = [ranks.put(np.zeros_like(xs[0]), r) for r in range(n)]
    for algorithm in [None, "push", *(["direct"] if ranks.reach else [])]:
        ranks.run(
            lambda comm, r, stream, how=algorithm: comm.send_recv(
                inputs[r], (r + 1) % n, outs[r], (r - 1) % n, algorithm=how, stream=stream
            )
        )
        assert all(difference(numbers(outs[r], "u8"), xs[(r - 1) % n]) is None for r in range(n)), algorithm
    counts = rng.integers(0, 500, (n, n))
    parts = [np.split(xs[r][: counts[r].sum()], np.cumsum(counts[r])[:-1]) for r in range(n)]
    wanted = [np.concatenate([parts[p][r] for p in range(n)]) for r in range(n)]
    for algorithm in [None, "push", *(["direct"] if ranks.reach else [])]:
        outs = ranks.run(
            lambda comm, r, stream, how=algorithm: comm.all_to_all_v(
                inputs[r][: int(counts[r].sum())],
                counts[r].tolist(),
                counts[:, r].tolist(),
                algorithm=how,
                stream=stream,
            )
        )
        assert all(difference(numbers(outs[r], "u8"), wanted[r]) is None for r in range(n)), algorithm
    got = [ranks.put(np.zeros_like(xs[0]), r) for r in range(n)]
    ranks.run(  # from every even rank to the last
        lambda comm, r, stream: comm.batch_send_recv(
            [(inputs[r], n - 1)] if r == 0 else [], [(got[r], 0)] if r == n - 1 else [], stream=stream
        )
    )
    assert difference(numbers(got[n - 1], "u8"), xs[0]) is None


def test_graph_replays_with_fresh_data(ranks: Gpus) -> None:
    import torch

    n = ranks.n
    xs = [torch.zeros(3000, dtype=torch.float32, device=device) for device in ranks.devices]
    outs = [torch.empty_like(x) for x in xs]
    ranks.run(lambda comm, r, stream: comm.all_reduce(xs[r], out=outs[r], stream=stream))
    graphs = ranks.capture(lambda comm, r: comm.all_reduce(xs[r], out=outs[r]))
    for replay in range(10):
        ranks.replay(graphs, xs, [np.full(3000, 100 * replay + r, np.float32) for r in range(n)])
        assert {out.unique().item() for out in outs} == {100 * replay * n + n * (n - 1) / 2}


def test_the_plan_names_what_runs(ranks: Gpus) -> None:
    comm = ranks.comms[0]
    for name in (*ALL, "send_recv", "all_to_all_v"):
        for size in (8, 4096, 1 << 20, 1 << 30):
            for symmetric in (False, True):
                how = traits.algorithm(comm.plan(name, size, symmetric))
                assert how.pieces == "chunks" and how.name != "copy_engine"
                assert ranks.reach or not how.direct


def test_the_others_are_refused(ranks: Gpus) -> None:
    x = ranks.put(np.zeros(100, np.float32), 0)
    for algorithm in ("one_shot_packets", "two_shot_packets", "one_shot_ll128", "copy_engine"):
        with pytest.raises(unisono.UsageError, match=f"{algorithm} is for up to 8 GPUs, not {ranks.n}"):
            ranks.comms[0].all_reduce(x, algorithm=algorithm, stream=ranks.streams[0])


def test_a_missing_rank_is_named() -> None:
    with gpus(9, max_sms=4, timeout_s=4) as ranks:
        xs = [ranks.put(np.ones(10, np.float32), r) for r in range(9)]
        for r in range(8):
            ranks.comms[r].all_reduce(xs[r], out=xs[r], algorithm="one_shot", stream=ranks.streams[r])
        texts = set()
        for r in range(8):
            with pytest.raises(unisono.TimeoutError, match="on the GPU for rank 8") as error:
                ranks.comms[r].synchronize(ranks.streams[r])
            texts.add(str(error.value))
        assert len(texts) == 1


def test_more_than_a_warp() -> None:
    """34 ranks: peers of the second word of a warp."""
    with gpus(34, max_sms=1, timeout_s=30) as ranks:
        for collective in ("all_reduce", "all_gather", "broadcast"):
            check(ranks, collective, 3001, "f32", "sum", None)
        check(ranks, "all_reduce", 3001, "f32", "sum", "one_shot")


def test_processes() -> None:
    devices_for(9)
    found = processes.play(9, "gpu_programs:collectives", "f32", [1000], timeout_s=200).results()
    assert [one["wrong"] for one in found] == [[]] * 9
    assert min(one["made"] for one in found) > 20
