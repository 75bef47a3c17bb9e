"""Tests every collective on GPUs, by every algorithm, against plain numpy, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unisono
from gpu_cases import ALL, MOVING, check, direct_algorithms, plain_algorithms
from gpus import Gpus, gpus, numbers, random_bits
from reference import DTYPES, OPS, combine, difference

pytestmark = pytest.mark.gpu
RANKS = [(n, True) for n in (1, 2, 3, 4, 5, 8)] + [(n, False) for n in (2, 3, 4, 8)]
COUNTS = (0, 1, 3, 1000, 12_289, 300_007)  # elements of the larger buffer, about


@pytest.fixture(scope="module", params=RANKS, ids=lambda way: f"{way[0]}-{'peers' if way[1] else 'host'}")
def ranks(request: pytest.FixtureRequest) -> Any:
    """Ranks whose GPUs reach each other's memory, and ranks that go through host memory."""
    n, peer_access = request.param
    with gpus(n, peer_access=peer_access) as made:
        yield made


@pytest.mark.parametrize("collective", ALL)
def test_plain_memory(ranks: Gpus, collective: str) -> None:
    for count in COUNTS:
        for algorithm in plain_algorithms(collective, ranks.nvlink):
            check(ranks, collective, count, "f32", "sum", algorithm)


@pytest.fixture(scope="module")
def pools(ranks: Gpus) -> Any:
    import torch

    size = 8 << 20
    return [ranks.comms.empty(size, torch.uint8) for _ in range(2)]


@pytest.mark.parametrize("collective", ALL)
def test_symmetric_memory(ranks: Gpus, pools: Any, collective: str) -> None:
    for count in COUNTS:
        for algorithm in [None, *(direct_algorithms(collective, ranks.n) if ranks.reach else [])]:
            check(ranks, collective, count, "f32", "sum", algorithm, pools)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_op(ranks: Gpus, pools: Any, dtype: str) -> None:
    for op in OPS:
        for algorithm in plain_algorithms("all_reduce", ranks.nvlink):
            check(ranks, "all_reduce", 5001, dtype, op, algorithm)
        check(ranks, "reduce_scatter", 5001, dtype, op, None)
        if ranks.reach:
            check(ranks, "all_reduce", 5001, dtype, op, "two_shot_direct", pools)
            check(ranks, "all_reduce", 5001, dtype, op, "two_shot_push", pools)
    for collective in MOVING:
        check(ranks, collective, 5001, dtype, "sum", None)


@pytest.mark.parametrize(
    ("dtype", "first"),
    [*(("u8", first) for first in range(8)), *(("bf16", first) for first in range(1, 4)), ("f32", 1)],
)
def test_unaligned(ranks: Gpus, dtype: str, first: int) -> None:
    """Buffers begin and end at any element, and take several pieces. Nothing beside them is written."""
    rng, n, count, last = np.random.default_rng(first), ranks.n, 20_011, (first + 3) % 8
    xs = [random_bits(rng, (first + count,), dtype) for _ in range(n)]
    inputs = [ranks.put(xs[r], r)[first:] for r in range(n)]
    blocks = [x[first:] for x in xs]
    for collective, wanted in (
        ("all_reduce", combine(blocks, "sum")),
        ("all_gather", np.concatenate(blocks)),
    ):
        around = random_bits(rng, (last + wanted.size + 8,), dtype)
        for algorithm in plain_algorithms(collective, ranks.nvlink):
            whole = [ranks.put(around, r) for r in range(n)]
            outs = [each[last : last + wanted.size] for each in whole]
            shaped = [out.view(n, count) if collective == "all_gather" else out for out in outs]
            ranks.run(
                lambda comm, r, stream, name=collective, how=algorithm, to=shaped: getattr(comm, name)(
                    inputs[r], out=to[r], algorithm=how, stream=stream
                )
            )
            for each in whole:
                got = numbers(each, dtype)
                assert difference(got[last : last + wanted.size], wanted) is None, (collective, algorithm)
                assert got[:last].tobytes() == around[:last].tobytes(), (collective, algorithm)
                assert got[-8:].tobytes() == around[-8:].tobytes(), (collective, algorithm)


@pytest.mark.parametrize("symmetric", [False, True])
def test_in_place(ranks: Gpus, pools: Any, symmetric: bool) -> None:
    rng, n = np.random.default_rng(8), ranks.n
    if symmetric and not ranks.reach:
        pytest.skip("nobody is reached")
    xs = [random_bits(rng, (40_001,), "f32") for _ in range(n)]
    wanted = combine(xs, "sum")
    names = direct_algorithms("all_reduce", n) if symmetric else plain_algorithms("all_reduce", ranks.nvlink)
    for algorithm in names:
        tensors = [ranks.put(xs[r], r) for r in range(n)]
        if symmetric:
            for r in range(n):
                raw = pools[0][r][: tensors[r].nbytes]
                tensors[r] = ranks.view(raw.copy_(tensors[r].view(raw.dtype)), xs[r])
        if algorithm == "copy_engine" and n > 1:  # inputs of the sums pass through the output
            with pytest.raises(unisono.UsageError, match="apart from the input"):
                ranks.comms[0].all_reduce(
                    tensors[0], out=tensors[0], algorithm=algorithm, stream=ranks.streams[0]
                )
            continue
        ranks.run(
            lambda comm, r, stream, t=tensors, how=algorithm: comm.all_reduce(
                t[r], out=t[r], algorithm=how, stream=stream
            )
        )
        assert all(difference(numbers(t, "f32"), wanted) is None for t in tensors), algorithm


@pytest.mark.parametrize(("n", "collective"), [(2, "reduce"), (2, "all_reduce"), (3, "all_reduce")])
def test_copy_engines_in_parts(n: int, collective: str) -> None:
    """Copies and sums of several parts overlap."""
    import torch

    count = n * (18 << 20) + 5
    with gpus(n) as ranks:
        if not ranks.reach:
            pytest.skip("nobody is reached")
        pools = [ranks.comms.empty(4 * count, torch.uint8) for _ in range(2)]
        check(ranks, collective, count, "f32", "sum", "copy_engine", pools)


@pytest.mark.parametrize("few_sms", [False, True], ids=["a kernel beside", "copy engines alone"])
@pytest.mark.parametrize("n", [2, 3])
def test_copies_by_engines_and_a_kernel(n: int, few_sms: bool) -> None:
    """Blocks are longer than the part that the kernel sends before the copy engines start."""
    import torch

    count = n * 700_001
    with gpus(n, **({"max_sms": 8} if few_sms else {})) as ranks:
        if not ranks.reach:
            pytest.skip("nobody is reached")
        pools = [ranks.comms.empty(4 * count, torch.uint8) for _ in range(2)]
        for collective in ("all_gather", "all_to_all", "broadcast", "gather", "scatter"):
            assert ranks.comms[0].sms(collective, 4 * count, "copy_engine", True) == (0 if few_sms else 16)
            check(ranks, collective, count, "f32", "sum", "copy_engine", pools)


def test_reduce_by_copy_engines_is_for_two(ranks: Gpus, pools: Any) -> None:
    if not ranks.reach or ranks.n == 1:
        pytest.skip("nobody is reached")
    x, out = (ranks.view(pool[0][:4096], np.zeros(1024, "f4")) for pool in pools)
    refused = [(x, "apart from the input")] + ([(out, "for two ranks")] if ranks.n > 2 else [])
    for output, message in refused:
        with pytest.raises(unisono.UsageError, match=message):
            ranks.comms[0].reduce(x, root=0, out=output, algorithm="copy_engine", stream=ranks.streams[0])


def test_all_to_all_in_place(ranks: Gpus) -> None:
    rng, n = np.random.default_rng(13), ranks.n
    for count in (5, 4096, 50_001):
        xs = [random_bits(rng, (n, count), "bf16") for _ in range(n)]
        for algorithm in plain_algorithms("all_to_all", ranks.nvlink):
            tensors = [ranks.put(x, r) for r, x in enumerate(xs)]
            ranks.run(
                lambda comm, r, stream, t=tensors, how=algorithm: comm.all_to_all(
                    t[r], out=t[r], algorithm=how, stream=stream
                )
            )
            for r in range(n):
                assert difference(numbers(tensors[r], "bf16"), np.stack([x[r] for x in xs])) is None, (
                    algorithm
                )


@pytest.mark.parametrize("algorithm", [None, "direct", "copy_engine"])
def test_scatter_and_gather_in_place_at_the_root(ranks: Gpus, pools: Any, algorithm: str | None) -> None:
    """The root's own block has another offset than the others. Peers must derive no addresses from it."""
    rng, n, root, count = np.random.default_rng(14), ranks.n, ranks.n - 1, 20_000
    if algorithm is not None and not ranks.reach:
        pytest.skip("nobody is reached")
    whole = random_bits(rng, (n, count), "f32")
    xs = [ranks.view(pools[0][r][: whole.nbytes], whole) for r in range(n)]
    xs[root].copy_(ranks.put(whole, root))
    outs = [
        xs[r][root] if r == root else ranks.view(pools[1][r][: whole[0].nbytes], whole[0]) for r in range(n)
    ]
    ranks.run(
        lambda comm, r, stream: comm.scatter(
            xs[r], root=root, out=outs[r], algorithm=algorithm, stream=stream
        )
    )
    assert all(difference(numbers(outs[r], "f32"), whole[r]) is None for r in range(n))
    for r in range(n):
        if r != root:
            xs[root][r].zero_()
    ranks.run(
        lambda comm, r, stream: comm.gather(outs[r], root=root, out=xs[r], algorithm=algorithm, stream=stream)
    )
    assert difference(numbers(xs[root], "f32"), whole) is None


def test_send_recv_ring(ranks: Gpus) -> None:
    rng, n = np.random.default_rng(9), ranks.n
    for count in COUNTS:
        xs = [random_bits(rng, (count,), "u8") for _ in range(n)]
        inputs = [ranks.put(x, r) for r, x in enumerate(xs)]
        outs = [ranks.put(np.zeros_like(xs[0]), r) for r in range(n)]
        ranks.run(
            lambda comm, r, stream, a=inputs, b=outs: comm.send_recv(
                a[r], (r + 1) % n, b[r], (r - 1) % n, stream=stream
            )
        )
        assert all(difference(numbers(outs[r], "u8"), xs[(r - 1) % n]) is None for r in range(n))


@pytest.mark.parametrize("goes", ["all", "some", "pairs"])
def test_batches(ranks: Gpus, goes: str) -> None:
    """Each pair has messages of its own size, from any place of a buffer. Ranks may have none."""
    rng, n = np.random.default_rng(10), ranks.n
    chosen: dict[str, Callable[[int, int], bool]] = {
        "all": lambda a, b: True,
        "some": lambda a, b: (a + 2 * b) % 3 == 0,
        "pairs": lambda a, b: a ^ b == 1,
    }
    every = [(a, b) for a in range(n) for b in range(n) if chosen[goes](a, b)]
    for most in (1, 100, 10_000, 1_000_003, 20_000_000 // n):
        counts = {pair: int(rng.integers(0, most + 1)) for pair in every}
        data = {pair: random_bits(rng, (count,), "u8") for pair, count in counts.items()}
        inputs = {pair: ranks.put(x, pair[0]) for pair, x in data.items()}
        outs = {pair: ranks.put(np.zeros_like(x), pair[1]) for pair, x in data.items()}
        ranks.run(
            lambda comm, r, stream, a=inputs, b=outs: comm.batch_send_recv(
                [(x, to) for (source, to), x in a.items() if source == r],
                [(out, source) for (source, to), out in b.items() if to == r],
                stream=stream,
            )
        )
        assert all(difference(numbers(outs[pair], "u8"), x) is None for pair, x in data.items())


@pytest.mark.parametrize("symmetric", ["all", "some", "in place"])
def test_send_recv_ring_on_symmetric_memory(ranks: Gpus, pools: Any, symmetric: str) -> None:
    """Outputs lie at other offsets on every rank, and on some ranks in plain memory."""
    rng, n = np.random.default_rng(12), ranks.n
    for count in (1, 1000, 300_007, 4_000_001):
        xs = [random_bits(rng, (count,), "u8") for _ in range(n)]
        for algorithm in [None, "direct", "push"] if ranks.reach else [None]:
            inputs = [ranks.put(x, r) for r, x in enumerate(xs)]
            outs = [pools[1][r][13 * r : 13 * r + count] for r in range(n)]
            if symmetric == "some":
                outs[::2] = [ranks.put(np.zeros_like(xs[0]), r) for r in range(0, n, 2)]
            if symmetric == "in place":
                for x, out in zip(inputs, outs, strict=True):
                    out.copy_(x)
                inputs = outs
            ranks.run(
                lambda comm, r, stream, a=inputs, b=outs, how=algorithm: comm.send_recv(
                    a[r], (r + 1) % n, b[r], (r - 1) % n, algorithm=how, stream=stream
                )
            )
            assert all(difference(numbers(outs[r], "u8"), xs[(r - 1) % n]) is None for r in range(n))


@pytest.mark.parametrize("symmetric", [True, False])
def test_send_and_recv_apart(ranks: Gpus, pools: Any, symmetric: bool) -> None:
    """Every even rank sends to the next one. Only the two ranks of a message call send and recv."""
    rng, n = np.random.default_rng(13), ranks.n
    for count, algorithm in itertools.product((1, 300_007, 4_000_001), (None, "direct", "push")):
        if algorithm == "direct" and not ranks.reach:
            continue
        xs = [random_bits(rng, (count,), "u8") for _ in range(n)]
        inputs = [ranks.put(x, r) for r, x in enumerate(xs)]
        outs = [ranks.put(np.zeros_like(xs[0]), r) for r in range(n)]
        if symmetric:
            outs = [pools[1][r][5 * r : 5 * r + count] for r in range(n)]

        def call(
            comm: Any, r: int, stream: Any, a: Any = inputs, b: Any = outs, how: Any = algorithm
        ) -> None:
            if r % 2 == 1:
                comm.recv(b[r], r - 1, algorithm=how, stream=stream)
            elif r + 1 < n:
                comm.send(a[r], r + 1, algorithm=how, stream=stream)

        ranks.run(call)
        assert all(difference(numbers(outs[r], "u8"), xs[r - 1]) is None for r in range(1, n, 2))


def test_all_to_all_v(ranks: Gpus) -> None:
    rng, n = np.random.default_rng(10), ranks.n
    counts = rng.integers(0, 5000, (n, n))
    xs = [random_bits(rng, (int(counts[r].sum()),), "f32") for r in range(n)]
    inputs = [ranks.put(x, r) for r, x in enumerate(xs)]
    outs = [ranks.put(np.zeros(int(counts[:, r].sum()), np.float32), r) for r in range(n)]
    ranks.run(
        lambda comm, r, stream: comm.all_to_all_v(
            inputs[r], counts[r].tolist(), counts[:, r].tolist(), outs[r], stream=stream
        )
    )
    for r in range(n):
        parts = [np.split(xs[s], np.cumsum(counts[s])[:-1])[r] for s in range(n)]
        assert difference(numbers(outs[r], "f32"), np.concatenate(parts)) is None


@pytest.mark.parametrize("own", [True, False])
def test_graph_replays_with_fresh_data(ranks: Gpus, own: bool) -> None:
    """The capture is on the stream of the calls before, or on another, as torch's default is."""
    import torch

    n = ranks.n
    xs = [torch.zeros(10_000, dtype=torch.bfloat16, device=device) for device in ranks.devices]
    outs = [torch.empty_like(x) for x in xs]
    ranks.run(lambda comm, r, stream: comm.all_reduce(xs[r], out=outs[r], stream=stream))

    def three(comm: unisono.Communicator, r: int) -> None:
        for _ in range(3):
            comm.all_reduce(xs[r], out=outs[r])

    others = None if own else [torch.cuda.Stream(device) for device in ranks.devices]
    graphs = ranks.capture(three, others)
    rng = np.random.default_rng(11)
    for _ in range(1000 if own and n <= 4 else 100):
        fresh = [rng.standard_normal(10_000).astype(np.float32).astype(DTYPES["bf16"]) for _ in range(n)]
        ranks.replay(graphs, xs, fresh)
        wanted = combine(fresh, "sum")
        assert all(difference(numbers(out, "bf16"), wanted) is None for out in outs)
    ranks.run(lambda comm, r, stream: comm.all_reduce(xs[r], out=outs[r], stream=stream))  # eager again
    assert all(difference(numbers(out, "bf16"), wanted) is None for out in outs)


def test_a_stream_that_is_gone(ranks: Gpus) -> None:
    """Cupy destroys a stream with its object. The next call, on another stream, must survive that."""
    cupy = pytest.importorskip("cupy")
    xs = [ranks.put(np.full(1000, r, np.float32), r) for r in range(ranks.n)]
    for _ in range(3):
        for r, comm in enumerate(ranks.comms):
            with cupy.cuda.Device(ranks.devices[r]):
                comm.all_reduce(xs[r], "max", out=xs[r], stream=cupy.cuda.Stream(non_blocking=True))
        ranks.run(lambda comm, r, stream: comm.all_reduce(xs[r], "max", out=xs[r], stream=stream))
    assert all(bool((x == ranks.n - 1).all()) for x in xs)


def test_parts_beyond_one_message(ranks: Gpus) -> None:
    """An all_to_all_v has a part above 2 GiB, another long one, and short ones: longest parts differ."""
    import torch

    n = ranks.n
    if n not in (2, 3):
        pytest.skip("two and three ranks show it")
    counts = [[1000] * n for _ in range(n)]
    counts[0][1], counts[0][n - 1] = (1 << 31) + 4097, (1 << 31) + 4097 if n == 2 else (3 << 29) + 5
    xs = [
        torch.randint(0, 256, (sum(counts[r]),), dtype=torch.uint8, device=ranks.devices[r]) for r in range(n)
    ]
    outs = [
        torch.zeros(sum(c[r] for c in counts), dtype=torch.uint8, device=ranks.devices[r]) for r in range(n)
    ]
    ranks.run(
        lambda comm, r, stream: comm.all_to_all_v(
            xs[r], counts[r], [c[r] for c in counts], out=outs[r], stream=stream
        )
    )
    for r in range(n):
        parts = [xs[s].split(counts[s])[r].to(ranks.devices[r]) for s in range(n)]
        assert torch.equal(outs[r], torch.cat(parts))


def test_calls_without_a_signal(ranks: Gpus) -> None:
    """The receivers of a scatter signal nothing: only the end of the kernel joins their warps."""
    rng, n = np.random.default_rng(21), ranks.n
    xs = random_bits(rng, (n, 8192), "f32")
    x = ranks.put(xs, 0)
    outs = [ranks.put(np.zeros_like(xs[0]), r) for r in range(n)]

    def scatters(comm: Any, r: int, stream: Any) -> None:
        for _ in range(300):
            comm.scatter(x if r == 0 else None, out=outs[r], algorithm="push", stream=stream)

    ranks.run(scatters)
    assert all(difference(numbers(outs[r], "f32"), xs[r]) is None for r in range(n))


def test_usage_errors(ranks: Gpus) -> None:
    import torch

    comm, device = ranks.comms[0], ranks.devices[0]
    x = torch.ones(8, device=device)
    with pytest.raises(unisono.UsageError, match="on the CPU"):
        comm.all_reduce(x, out=torch.ones(8))
    with pytest.raises(unisono.UsageError, match="not contiguous"):
        comm.all_reduce(torch.ones(8, 8, device=device).t())
    with pytest.raises(unisono.UsageError, match="is not a stream"):
        comm.all_reduce(x, stream="main")
    if ranks.reach:
        with pytest.raises(unisono.UsageError, match="Communicator::empty"):
            comm.all_reduce(x, algorithm="two_shot_direct")
    with pytest.raises(unisono.UsageError, match="no algorithm"):
        comm.all_reduce(x, algorithm="nonsense")
