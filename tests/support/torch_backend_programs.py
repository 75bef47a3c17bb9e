"""Programs of ranks that call torch.distributed with the backend `unisono`, for `ranks.play`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEVICE = os.environ.get("UNISONO_TEST_TORCH_DEVICE", "cpu")  # of the tensors that go into calls
SIZES = ((1,), (7,), (3, 5), (0,), (2, 0, 3), (20001,))
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)  # which are moved alone
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


@contextmanager
def world(store: str, seconds: float = 60) -> Iterator[tuple[int, int]]:
    """Makes the default process group of the backend. Gives rank and size."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_default_device(DEVICE)
    dist.init_process_group(
        "unisono",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        yield rank, size
    finally:
        dist.destroy_process_group()


def data(shape: tuple[int, ...], dtype: torch.dtype, *seed: int, strided: bool = False) -> torch.Tensor:
    """Returns random data of a seed; strided: not contiguous."""
    generator = torch.Generator().manual_seed(sum((7 + s) * 31**i for i, s in enumerate(seed)))
    whole = (*shape[:-1], 2 * shape[-1]) if strided and shape else shape
    numbers = torch.randint(-4, 5, whole, generator=generator, device="cpu")
    if dtype.is_floating_point and dtype.itemsize > 1:
        tensor = (numbers + torch.rand(whole, generator=generator, device="cpu")).to(dtype)
    else:
        tensor = (numbers.abs() if dtype == torch.uint8 else numbers).to(torch.float32).to(dtype)
    tensor = tensor.to(DEVICE)
    return tensor[..., ::2] if strided and shape else tensor


def same(mine: torch.Tensor, theirs: torch.Tensor, *what: object) -> None:
    """Fails unless two results are equal, sums of floats to rounding."""
    if mine.dtype.itemsize == 1 and mine.dtype.is_floating_point:
        mine, theirs = mine.view(torch.uint8), theirs.view(torch.uint8)
    rounding = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4, torch.float64: 1e-10}
    near = rounding.get(mine.dtype, 0)
    torch.testing.assert_close(
        mine.cpu(), theirs.cpu(), rtol=near, atol=near, msg=lambda text: f"{what}: {text}"
    )


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


def settle() -> None:
    """Waits for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def again(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


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
            for op in OPS:
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
    if DEVICE == "cpu":  # NCCL, which would carry it, takes one rank a GPU
        both(
            "all_reduce",
            lambda x, **o: dist.all_reduce(x, dist.ReduceOp.BXOR, **o),
            data((9,), torch.int32, rank),
        )
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


def groups(store: str) -> None:
    """Groups of some ranks, dozens of them, and two that two threads use."""
    with world(store) as (rank, size):
        for number in range(16):
            ranks = [r for r in range(size) if r == number % size or r >= number % 3]
            group = dist.new_group(ranks)
            if rank in ranks:
                x = torch.tensor([float(rank)])
                dist.all_reduce(x, group=group)
                assert x.item() == sum(ranks)
                dist.broadcast(x, ranks[-1], group=group)
        everyone = list(range(size))
        pair = [dist.new_group(everyone), dist.new_group(everyone)]
        errors: list[BaseException] = []

        def calls(group: Any, factor: float) -> None:
            try:
                for i in range(100):
                    x = torch.full((300,), factor * i)
                    dist.all_reduce(x, group=group)
                    assert torch.equal(x, torch.full((300,), factor * i * size))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=calls, args=(group, 1.0 + i)) for i, group in enumerate(pair)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors


def model() -> nn.Module:
    torch.manual_seed(3)
    with torch.device("cpu"):
        layers = nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 33), nn.BatchNorm1d(33), nn.Linear(33, 5)
    return nn.Sequential(*layers).to(DEVICE)


def train(
    steps: int, wrapped: nn.Module, rank: int, after: Callable[[int], None] = lambda step: None
) -> list[float]:
    """Returns the losses of some steps of SGD on this rank's data."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    losses, device = [], next(wrapped.parameters()).device
    for step in range(steps):
        x, y = data((16, 20), torch.float32, rank, step), data((16, 5), torch.float32, rank, step, 1)
        x, y = x.to(device), y.to(device)
        loss = nn.functional.mse_loss(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(step)
    return losses


def ddp(store: str) -> list[float]:
    """Losses by DDP as gloo's to rounding, and parameters that are the same bits on all ranks."""
    with world(store) as (rank, size):
        peer = dist.new_group(list(range(size)), backend="gloo")
        mine = DistributedDataParallel(model(), bucket_cap_mb=0.01)
        losses = train(4, mine, rank)
        # gloo's end waits for its thread, which may wait for the GIL: nothing keeps its group until then
        theirs = train(
            4, DistributedDataParallel(model().cpu(), process_group=peer, bucket_cap_mb=0.01), rank
        )
        torch.testing.assert_close(losses, theirs, rtol=1e-4, atol=1e-5)
        for parameter in mine.cpu().parameters():
            everyone = [torch.zeros_like(parameter) for _ in range(size)]
            dist.all_gather(everyone, parameter.detach(), group=peer)
            assert all(torch.equal(one, parameter) for one in everyone)
        return losses


def sharded(store: str) -> None:
    """A step of FSDP2, and DTensor from one placement to another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with world(store) as (rank, size):
        mesh = init_device_mesh(DEVICE, (size,))
        whole = data((5, 7), torch.float32, 1)
        parts = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(parts.redistribute(mesh, [Replicate()]).to_local(), whole)
        assert torch.equal(parts.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))
        torch.manual_seed(3)
        for parameter in net.parameters():
            parameter.data.normal_()
        plain = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))
        plain.load_state_dict(net.state_dict())
        plain.cpu()
        peer = dist.new_group(list(range(size)), backend="gloo")
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh)
        losses = train(3, net, rank)
        theirs = train(3, DistributedDataParallel(plain, process_group=peer), rank)
        torch.testing.assert_close(losses, theirs, rtol=1e-4, atol=1e-5)


def killed(store: str) -> str:
    """Rank 1 dies in a step of DDP. Returns the others' error."""
    with world(store, seconds=120) as (rank, _):

        def after(step: int) -> None:
            if rank == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            train(100, DistributedDataParallel(model()), rank, after)
        except RuntimeError as error:
            return str(error)
    raise AssertionError("no error")


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor(float(at))


def left_open(store: str) -> None:
    """DataLoader's workers are forked after async calls; the process ends without destroy_process_group."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])
    dist.init_process_group("unisono", store=dist.FileStore(store, size), rank=rank, world_size=size)
    dist.all_reduce(torch.ones(5), async_op=True).wait()
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    for _ in range(2):
        x = sum(batch.sum() for batch in loader)
        dist.all_reduce(x, async_op=True).wait()
        assert x.item() == 28 * size
    child = os.fork()
    if not child:
        try:
            dist.all_reduce(torch.ones(5))
        except RuntimeError as error:
            if "forked" in str(error):
                dist.destroy_process_group()
                os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.all_reduce(torch.ones(5))


def misuse(store: str) -> list[str]:
    """Calls that are wrong by themselves. Returns what they say; the group goes on."""
    with world(store) as (_, size):
        said = []
        for call in (
            lambda: dist.all_gather_into_tensor(torch.zeros(size * 3 + 1), torch.zeros(3)),
            lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(size * 3 + 1)),
            lambda: dist.all_to_all_single(
                torch.zeros(size), torch.zeros(size), [1] * (size + 1), [1] * size
            ),
        ):
            try:
                call()
            except (RuntimeError, ValueError) as error:
                said.append(str(error).splitlines()[0])
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x[0].item() == size
        return said


def by_torchrun() -> None:
    """A rank that torchrun has started, and starts again after one was killed."""
    dist.init_process_group("unisono")
    x = torch.ones(3)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    print(f"sum of {dist.get_backend()} {int(x[0])}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    by_torchrun()
    sys.exit(0)
