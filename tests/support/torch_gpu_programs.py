"""Programs of ranks that call torch.distributed with the backend `unisono` on GPUs, for `ranks.play`."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_ranks import data, model, same, settle, train, world

MANY = 1_000_003  # elements that no ring holds


def late() -> None:
    """Keeps the current stream busy for some milliseconds."""
    torch.cuda._sleep(5_000_000)


def streams(store: str) -> None:
    """Calls are ordered by streams alone, and keep their tensors until then."""
    with world(store) as (rank, size):
        dist.barrier(device_ids=[torch.cuda.current_device()])  # makes what the group has on GPUs
        host_waits_for_nothing(store, rank, size)
        other, works = torch.cuda.Stream(), []
        for i in range(12):
            x = torch.full((MANY,), float(i))
            late()
            x += rank  # which the call waits for
            work = dist.all_reduce(x, async_op=True)
            if i % 3 == 0:
                work.wait()
                same(x + 1, torch.full((MANY,), 1.0 + size * i + sum(range(size))), "waited for", i)
            elif i % 3 == 1:
                with torch.cuda.stream(other):
                    work.wait()
                    y = x * 2
                torch.cuda.current_stream().wait_stream(other)
                same(y, torch.full((MANY,), 2.0 * (size * i + sum(range(size)))), "on a stream", i)
            else:
                works.append((work, x, work.get_future()))
        for i, (work, x, future) in zip(range(2, 12, 3), works, strict=True):
            future.wait()
            same(x, torch.full((MANY,), float(size * i + sum(range(size)))), "future", i)
            settle()
            assert work.is_completed() and work.is_success() and work.result()[0] is not None
        dropped(rank, size)


def host_waits_for_nothing(store: str, rank: int, size: int) -> None:
    """Each rank makes its call when the one before has made its own."""
    keys = dist.FileStore(f"{store}.keys", size)
    for asynchronous in (False, True):
        if rank > 0:
            keys.wait([f"called {asynchronous} {rank - 1}"])
        x = torch.full((MANY,), float(rank))
        work = dist.all_reduce(x, async_op=asynchronous)
        keys.set(f"called {asynchronous} {rank}", "")
        if work is not None:
            work.wait()
        same(x, torch.full((MANY,), float(sum(range(size)))), "a late rank")


def dropped(rank: int, size: int) -> None:
    """A tensor that the program lets go of is not written again before the call has read it."""
    for i in range(4):
        if rank == 0:
            dist.broadcast(torch.full((MANY,), float(i)), 0, async_op=True)
            torch.full((MANY,), float("nan"))
        else:
            y = torch.zeros(MANY)
            late()
            dist.broadcast(y, 0)
            same(y, torch.full((MANY,), float(i)), "dropped")


def captured(store: str) -> None:
    """A graph of calls on the current stream and beside it, replayed on other numbers."""
    with world(store) as (rank, size):
        x, out = torch.zeros(333), torch.zeros(size, 333)
        dist.all_reduce(x)  # the group's first call on GPUs

        def step() -> None:
            total = x * 2
            dist.all_reduce(total)
            total += rank
            work = dist.all_reduce(total, async_op=True)
            work.wait()
            dist.all_gather_into_tensor(out, total - rank)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for i in range(5):
            everyone = [data((333,), torch.float32, r, i) for r in range(size)]
            x.copy_(everyone[rank])
            graph.replay()
            total = size * 2 * torch.stack(everyone).sum(0) + sum(range(size))
            same(out, torch.stack([total - r for r in range(size)]), "graph", i)
            dist.all_reduce(x)  # eager, between two replays
            same(x, torch.stack(everyone).sum(0), "eager", i)
        fresh = dist.new_group(list(range(size)))
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                dist.all_reduce(x, group=fresh)
        except RuntimeError as error:
            assert "make the call once before" in str(error), error
        else:
            raise AssertionError("a graph has captured the first call of a group")


def set_timeout(store: str) -> None:
    """Rank 1 is late in a group whose timeout was set before its first call on GPUs, and after it."""
    with world(store) as (rank, size):
        told = dist.FileStore(f"{store}-told", size)
        for before in (True, False):
            group = dist.new_group(list(range(size)))
            if before:
                group.set_timeout(timedelta(seconds=2))
            dist.all_reduce(x := torch.ones(3), group=group)
            same(x, torch.full((3,), float(size)), "in time", before)
            if not before:
                group.set_timeout(timedelta(seconds=2))
            if rank == 1:
                told.wait([f"told {before}"])
                continue
            dist.all_reduce(x, group=group)
            settle()
            with pytest.raises(dist.DistBackendError, match="has waited 2 s on the GPU for rank 1"):
                dist.all_reduce(x, group=group)
            told.set(f"told {before}", "")


def messages(store: str) -> None:
    """Messages before any collective, several of a pair in a batch, and objects by GPU memory."""
    with world(store) as (rank, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        if size > 1:
            got = torch.zeros(MANY)
            for at in range(size):  # one after the other: a message waits for its peer
                if rank == at:
                    dist.send(torch.full((MANY,), float(rank)), after)
                if before == at:
                    dist.recv(got, before)
            same(got, torch.full((MANY,), float(before)), "recv")
        sizes = (MANY, 3, 0, 7)
        outs = [torch.zeros(n, 2)[:, 0] for n in sizes]
        ops = [dist.P2POp(dist.isend, data((n,), torch.float32, rank, n), after) for n in sizes]
        ops += [dist.P2POp(dist.irecv, out, before) for out in outs]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for n, out in zip(sizes, outs, strict=True):
            same(out, data((n,), torch.float32, before, n), "batch", n)
        tensors = [torch.full((5,), float(rank + r)) for r in range(size)]
        with dist._coalescing_manager(device=torch.device("cuda", torch.cuda.current_device())):
            for root, tensor in enumerate(tensors):
                dist.broadcast(tensor, root, async_op=True)
        for root, tensor in enumerate(tensors):
            same(tensor, torch.full((5,), 2.0 * root), "coalesced")
        group = dist.new_group(list(range(size)), backend="cuda:unisono")
        objects = [{"from": 0, "text": "x" * 5000}, 17] if rank == 0 else [None, None]
        dist.broadcast_object_list(objects, 0, group=group)
        assert objects == [{"from": 0, "text": "x" * 5000}, 17]


def alone(store: str) -> None:
    """One rank: losses of DDP as NCCL's, and a reduction that NCCL carries within the group."""
    with world(store) as (rank, _):
        peer = dist.new_group([0], backend="nccl")
        losses = train(4, DistributedDataParallel(model(), bucket_cap_mb=0.01), rank)
        theirs = train(4, DistributedDataParallel(model(), process_group=peer, bucket_cap_mb=0.01), rank)
        torch.testing.assert_close(losses, theirs, rtol=1e-4, atol=1e-5)
        x = data((100,), torch.float32, rank)
        y = x.clone()
        dist.all_reduce(y, dist._make_nccl_premul_sum(0.5))
        same(y, x / 2, "premultiplied")
