"""Programs of ranks that make each call of torch.distributed by `unisono` and by gloo, for `ranks.play`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_ranks import DEVICE, again, data, same, settle, world

SIZES = ((1,), (7,), (3, 5), (0,), (2, 0, 3), (20001,))
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)  # which are moved alone
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


class Both:
    """Makes a call of both backends, on copies of the same tensors, and compares what it has written.

    Gloo's are on the CPU. Types that gloo does not move are bytes there.
    """

    def __init__(self, size: int) -> None:
        self.peer = dist.new_group(list(range(size)), backend="gloo")
        self.calls = 0

    def __call__(self, what: str, call: Callable[..., Any], *tensors: torch.Tensor) -> None:
        copies = [
            again(one).cpu().view(torch.uint8) if one.dtype in OTHERS else again(one).cpu() for one in tensors
        ]
        asynchronous = self.calls % 2 == 1
        self.calls += 1
        work = call(*tensors, group=None, async_op=asynchronous)
        if asynchronous:
            work.wait()
            settle()
            assert work.is_completed()
        call(*copies, group=self.peer, async_op=False)
        for mine, theirs in zip(tensors, copies, strict=True):
            same(mine.view(theirs.dtype), theirs, what, tuple(mine.shape), mine.dtype)


def moves(both: Both, rank: int, size: int) -> None:
    """Every collective that moves data, of every type and shape, beside gloo."""
    for number, shape in enumerate(SIZES):
        for dtype in (*FLOATS[:2], *INTEGERS[:2], *OTHERS):
            strided = bool((number + dtype.itemsize) % 2) and dtype.itemsize > 1
            mine = data(shape, dtype, rank, number, strided=strided)
            root = number % size
            blank = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
            both("broadcast", lambda x, root=root, **o: dist.broadcast(x, root, **o), again(mine))
            both("all_gather", lambda x, *y, **o: dist.all_gather(list(y), x, **o), again(mine), *blank)
            gathered = torch.zeros((size * shape[0], *shape[1:]), dtype=dtype)
            both(
                "all_gather_into_tensor",
                lambda x, y, **o: dist.all_gather_into_tensor(y, x, **o),
                again(mine),
                gathered,
            )
            alone = rank == root
            both(
                "gather",
                lambda x, *y, root=root, alone=alone, **o: dist.gather(
                    x, list(y) if alone else None, root, **o
                ),
                again(mine),
                *blank,
            )
            parts = [data(shape, dtype, rank, number, r) for r in range(size)]
            both(
                "scatter",
                lambda y, *x, root=root, alone=alone, **o: dist.scatter(
                    y, list(x) if alone else None, root, **o
                ),
                again(mine),
                *parts,
            )
            both(
                "all_to_all_single",
                lambda x, y, **o: dist.all_to_all_single(y, x, **o),
                torch.cat(parts),
                torch.zeros_like(gathered),
            )
            check_strided(mine, size, root)
    uneven(both, rank, size)


def check_strided(mine: torch.Tensor, size: int, root: int) -> None:
    """A tensor with holes moves as its copy does, and its holes stay."""
    outs = [torch.zeros((*mine.shape, 2), dtype=mine.dtype)[..., 0] for _ in range(size)]
    exact = [torch.zeros(mine.shape, dtype=mine.dtype) for _ in range(size)]
    dist.all_gather(outs, mine)
    dist.all_gather(exact, again(mine))
    holes = torch.zeros((*mine.shape, 2), dtype=mine.dtype)
    holes[..., 0] = mine
    dist.broadcast(holes[..., 0], root)
    for a, b in zip([*outs, holes[..., 0]], [*exact, exact[root]], strict=True):
        assert torch.equal(again(a).view(torch.uint8), b.view(torch.uint8))
    assert not holes[..., 1].view(torch.uint8 if mine.dtype.itemsize == 1 else mine.dtype).any()


def uneven(both: Both, rank: int, size: int) -> None:
    """all_to_all_single by splits beside gloo, and all_to_all of lists beside that."""
    sends = [(rank + 2 * r) % 4 for r in range(size)]
    receives = [(r + 2 * rank) % 4 for r in range(size)]
    for dtype in (torch.float32, torch.int16, torch.complex64):
        x = data((sum(sends), 3), dtype, rank, 1)
        y = torch.zeros((sum(receives), 3), dtype=dtype)
        both("all_to_all_single", lambda x, y, **o: dist.all_to_all_single(y, x, receives, sends, **o), x, y)
        outs = [torch.zeros((count, 3), dtype=dtype) for count in receives]
        dist.all_to_all(outs, list(x.split(sends)))
        same(torch.cat(outs), y, "all_to_all")


def reductions(both: Both, rank: int, size: int) -> None:
    """Every collective that combines, of every type and operation, beside gloo."""
    for number, shape in enumerate(SIZES):
        for dtype in (*FLOATS, *INTEGERS):
            for op in (*OPS, *(BITWISE if DEVICE == "cpu" and dtype in INTEGERS else ())):
                root = number % size
                mine = data(shape, dtype, rank, number)
                parts = [data(shape, dtype, rank, number, r) for r in range(size)]
                both("all_reduce", lambda x, op=op, **o: dist.all_reduce(x, op, **o), mine.clone())
                y = mine.clone()
                dist.reduce(y, root, op)
                theirs = mine.cpu().clone()
                dist.reduce(theirs, root, op, group=both.peer)
                same(y, theirs if rank == root else mine, "reduce")
                x, total = torch.stack(parts), torch.stack(parts).cpu()
                dist.all_reduce(total, op, group=both.peer)
                y = torch.zeros(shape, dtype=dtype)
                dist.reduce_scatter_tensor(y, x, op)
                same(y, total[rank], "reduce_scatter_tensor", op)
                y = torch.zeros(shape, dtype=dtype)
                dist.reduce_scatter(y, parts, op)
                same(y, total[rank], "reduce_scatter", op)
    own_reductions(both, rank, size)
    if DEVICE == "cpu":  # on GPUs NCCL's: torch_gpu_programs.py
        premultiplied(both, rank, size)


def premultiplied(both: Both, rank: int, size: int) -> None:
    """Sums of inputs that each rank scales by a factor of its own, beside gloo's of inputs scaled by hand."""
    for number, shape in enumerate(SIZES):
        for dtype in FLOATS:
            factor = (0.3, 1.0, -2.0, 1 / 7)[(number + rank) % 4]
            alone = torch.tensor([factor], dtype=dtype)  # ranks may give either
            op = dist._make_nccl_premul_sum(alone if rank % 2 else factor)
            factor = alone.item() if rank % 2 else factor
            root = number % size
            mine = data(shape, dtype, rank, number)
            parts = [data(shape, dtype, rank, number, r) for r in range(size)]
            total = mine * factor
            dist.all_reduce(total, group=both.peer)
            for asynchronous in (False, True):
                y = mine.clone()
                if work := dist.all_reduce(y, op, async_op=asynchronous):
                    work.wait()
                same(y, total, "premultiplied all_reduce", shape, dtype)
            y = mine.clone()
            dist.reduce(y, root, op)
            same(y, total if rank == root else mine, "premultiplied reduce")
            x = torch.stack(parts)
            total = x * factor
            dist.all_reduce(total, group=both.peer)
            y = torch.zeros(shape, dtype=dtype)
            dist.reduce_scatter_tensor(y, x, op)
            same(y, total[rank], "premultiplied reduce_scatter_tensor")
            y = torch.zeros(shape, dtype=dtype)
            dist.reduce_scatter(y, parts, op)
            same(y, total[rank], "premultiplied reduce_scatter")
            assert torch.equal(x, torch.stack(parts))
    others(both, rank, size)


def others(both: Both, rank: int, size: int) -> None:
    """Premultiplied sums of complex numbers, of several tensors, of uneven parts, and of other types."""
    op = dist._make_nccl_premul_sum(rank + 0.5)
    z = torch.complex(data((33,), torch.float64, rank), data((33,), torch.float64, rank, 1))
    total = torch.view_as_real(z * (rank + 0.5))
    dist.all_reduce(total, group=both.peer)
    dist.all_reduce(z, op)
    same(torch.view_as_real(z), total, "premultiplied complex")
    tensors = [data((n,), torch.float32, rank, n) for n in (3, 0, 70)]
    totals = [t * (rank + 0.5) for t in tensors]
    dist.all_reduce_coalesced(tensors, op)
    for tensor, total in zip(tensors, totals, strict=True):
        dist.all_reduce(total, group=both.peer)
        same(tensor, total, "premultiplied all_reduce_coalesced")
    lengths = [1 + 2 * r for r in range(size)]
    ins = [data((n,), torch.float64, rank, n) for n in lengths]
    y = torch.zeros(lengths[rank], dtype=torch.float64)
    dist.reduce_scatter(y, ins, op)
    everyone = [data((lengths[rank],), torch.float64, r, lengths[rank]) * (r + 0.5) for r in range(size)]
    same(y, sum(everyone), "premultiplied and uneven")
    for dtype in (torch.int32, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(RuntimeError):  # gloo's, which carries these and has none
            dist.all_reduce(torch.ones(3).to(dtype), op)


def own_reductions(both: Both, rank: int, size: int) -> None:
    """Reductions that gloo lacks, or that go to it, beside sums of what everyone has."""
    everyone = torch.stack([data((33,), torch.float32, r, 5) for r in range(size)])
    mine = everyone[rank].clone()
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    same(mine, everyone.mean(0), "avg")
    bools = everyone > 1
    for op, total in ((dist.ReduceOp.SUM, bools.any(0)), (dist.ReduceOp.MIN, bools.all(0))):
        flags = bools[rank].clone()
        dist.all_reduce(flags, op)
        same(flags, total, "bool")
    complexes = torch.complex(everyone, everyone.flip(1))
    z = complexes[rank].clone()
    dist.all_reduce(z)
    same(torch.view_as_real(z), torch.view_as_real(complexes.sum(0)), "complex")
    strided = torch.stack([everyone[rank], everyone[rank]], 1)
    dist.all_reduce(strided[:, 0])
    same(strided, torch.stack([everyone.sum(0), everyone[rank]], 1), "strided")
    if DEVICE == "cpu":  # NCCL, which would carry them, has none
        for op in BITWISE:
            both("all_reduce", lambda x, op=op, **o: dist.all_reduce(x, op, **o), bools[rank].clone())
        with pytest.raises(RuntimeError):  # gloo's
            dist.all_reduce(mine.clone(), dist.ReduceOp.BXOR)
    tensors = [data((n,), torch.float32, rank, n) for n in (3, 0, 70)]
    theirs = [t.cpu().clone() for t in tensors]
    dist.all_reduce_coalesced(tensors)
    for tensor in theirs:
        dist.all_reduce(tensor, group=both.peer)
    for a, b in zip(tensors, theirs, strict=True):
        same(a, b, "all_reduce_coalesced")
    lengths = [1 + 2 * r for r in range(size)]
    ins = [data((n,), torch.float64, rank, n) for n in lengths]
    y = torch.zeros(lengths[rank], dtype=torch.float64)
    dist.reduce_scatter(y, ins)
    same(y, sum(data((lengths[rank],), torch.float64, r, lengths[rank]) for r in range(size)), "uneven")


def coalesced(rank: int, size: int) -> None:
    """The collectives that DTensor and torch.compile make, and calls in place."""
    group = dist.group.WORLD
    ins = [data((n, 2), torch.float32, rank, n) for n in (1, 4, 0)]
    outs = [torch.zeros(n * size, 2) for n in (1, 4, 0)]
    group.allgather_into_tensor_coalesced(outs, ins).wait()
    for n, out in zip((1, 4, 0), outs, strict=True):
        same(out, torch.cat([data((n, 2), torch.float32, r, n) for r in range(size)]))
    sums = [torch.zeros(n, 2) for n in (1, 4, 0)]
    group.reduce_scatter_tensor_coalesced(sums, outs).wait()
    for a, b in zip(sums, ins, strict=True):
        same(a, b * size)
    whole = torch.zeros(size * 5)
    mine = whole[rank * 5 : rank * 5 + 5]
    mine += rank + 1
    dist.all_gather_into_tensor(whole, mine)  # in place
    same(whole, torch.arange(1.0, size + 1).repeat_interleave(5))
    dist.reduce_scatter_tensor(mine, whole)
    same(mine, torch.full((5,), (rank + 1.0) * size))
    parts = list(data((size * 5,), torch.float32, 3).chunk(size))
    scattered, first = parts[rank].clone(), rank == 0
    dist.scatter(parts[0], parts if first else None)  # in place at the root
    same(parts[0], scattered)
    dist.scatter(parts[-1], parts if first else None)  # over another rank's part
    same(parts[-1], scattered)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank * 1000})
    assert [one["rank"] for one in objects] == list(range(size))
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    assert torch.equal(
        future.wait()[0] if isinstance(future.wait(), list) else future.wait(), torch.full((3,), float(size))
    )
    chained(size)
    works = [dist.all_reduce(torch.full((1000,), float(i)), async_op=True) for i in range(50)]
    last = torch.ones(3)
    dist.all_reduce(last)  # behind those
    for work in works:
        work.wait()
    assert [work.result()[0][0].item() for work in works] == [float(i * size) for i in range(50)]
    neighbours(rank, size)
    if DEVICE == "cpu":
        sparse = torch.eye(3).to_sparse()
        dist.all_reduce(sparse)  # which is gloo's
        assert torch.equal(sparse.to_dense(), torch.eye(3) * size)
    dist.barrier()


def chained(size: int) -> None:
    """Callbacks that begin calls and wait for them, as PowerSGD's do, with calls begun behind."""

    def next_sum(future: Any) -> torch.Tensor:
        dist.barrier()
        (x,) = future.value()
        return dist.all_reduce(x + 1, async_op=True).get_future().wait()[0]

    first = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    second = first.then(next_sum)
    behind = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)] if size == 1 else []
    assert torch.equal(second.wait(), torch.full((3,), float(size * (size + 1))))
    for work in behind:
        work.wait()


def neighbours(rank: int, size: int) -> None:
    """Sends and receives; on CPUs with tags, several under way."""
    if size == 1:
        return
    got = torch.zeros(4)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ])  # fmt: skip
    for work in works:
        work.wait()
    assert torch.equal(got, torch.full((4,), float((rank - 1) % size)))
    if DEVICE != "cpu":
        return
    outs = [torch.zeros(40000)[::2] for _ in range(4)]
    receives = [dist.irecv(outs[tag], (rank - 1) % size, tag=tag) for tag in (3, 1, 2, 0)]
    sends = [
        dist.isend(data((20000,), torch.float32, rank, tag), (rank + 1) % size, tag=tag) for tag in range(4)
    ]
    for work in [*receives, *sends]:
        work.wait()
    for tag, out in enumerate(outs):
        assert torch.equal(out, data((20000,), torch.float32, (rank - 1) % size, tag))
    large, got_large = data((700_001,), torch.float32, rank, 9), torch.zeros(700_001)
    receive = dist.irecv(got_large, (rank - 1) % size, tag=9)
    called = receive.get_future().then(lambda future: torch.equal(future.value()[0], got_large))
    try:
        receive.wait(timedelta(milliseconds=10))
    except RuntimeError as error:
        assert "timed out" in str(error)
    assert not receive.is_completed()
    dist.barrier()
    dist.isend(large, (rank + 1) % size, tag=9).wait()
    receive.wait()
    assert called.wait()
    assert torch.equal(got_large, data((700_001,), torch.float32, (rank - 1) % size, 9))
    if rank == 0:
        assert {dist.recv(got) for _ in range(size - 1)} == set(range(1, size))
    else:
        dist.send(got, 0)


def collectives(store: str) -> None:
    """All of the above."""
    with world(store) as (rank, size):
        both = Both(size)
        moves(both, rank, size)
        reductions(both, rank, size)
        coalesced(rank, size)


def coalesced_alone(store: str) -> None:
    with world(store) as (rank, size):
        coalesced(rank, size)
