"""Programs of ranks that make every call where torch looks for its Work, for `ranks.play`.

Calls with async_op=False have ended when they return, and torch gets no Work of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ranks import DEVICE, data, model, same, train, world

WIDTH = 5  # of each rank's part


class Passes(TorchDispatchMode):
    """Passes each call on, through torch's boxed values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def public(rank: int, size: int, seed: int) -> None:
    """Each collective of torch.distributed beside sums and parts of every rank's data."""
    everyone = [data((size, WIDTH), torch.float64, r, seed) for r in range(size)]
    mine, total, root = everyone[rank].clone(), torch.stack(everyone).sum(0), seed % size
    firsts, columns = torch.stack([e[0] for e in everyone]), torch.stack([e[rank] for e in everyone])

    def blank(*shape: int) -> torch.Tensor:
        return torch.zeros(shape or (size, WIDTH), dtype=torch.float64)

    dist.all_reduce(x := mine.clone())
    same(x, total, "all_reduce")
    dist.reduce(x := mine.clone(), root)
    same(x, total if rank == root else mine, "reduce")
    dist.broadcast(x := mine.clone(), root)
    same(x, everyone[root], "broadcast")
    dist.all_gather(list(x := blank()), mine[0])
    same(x, firsts, "all_gather")
    dist.all_gather_into_tensor(x := blank(size * WIDTH), mine[0])
    same(x.view(size, WIDTH), firsts, "all_gather_into_tensor")
    x = blank()
    dist.gather(mine[0], list(x) if rank == root else None, root)
    same(x, firsts if rank == root else blank(), "gather")
    dist.scatter(x := blank(WIDTH), list(mine) if rank == root else None, root)
    same(x, everyone[root][rank], "scatter")
    dist.reduce_scatter(x := blank(WIDTH), list(mine))
    same(x, total[rank], "reduce_scatter")
    dist.reduce_scatter_tensor(x := blank(WIDTH), mine.view(-1))
    same(x, total[rank], "reduce_scatter_tensor")
    dist.all_to_all(list(x := blank()), list(mine))
    same(x, columns, "all_to_all")
    dist.all_to_all_single(x := blank(), mine)
    same(x, columns, "all_to_all_single")
    dist.all_reduce_coalesced(several := [mine.clone(), mine[0].clone()])
    same(several[0], total, "all_reduce_coalesced")
    same(several[1], total[0], "all_reduce_coalesced")
    dist.barrier()


def objects(rank: int, size: int, seed: int) -> None:
    """The calls that move objects."""
    root, all_of_them = seed % size, [{"rank": r, "text": "x" * 50 * r} for r in range(size)]
    mine = all_of_them[rank]
    got: list[Any] = [None] * size
    dist.all_gather_object(got, mine)
    assert got == all_of_them
    got = [None] * size
    dist.gather_object(mine, got if rank == root else None, root)
    assert got == (all_of_them if rank == root else [None] * size)
    got = [mine]
    dist.broadcast_object_list(got, root)
    assert got == [all_of_them[root]]
    got = [None]
    dist.scatter_object_list(got, all_of_them if rank == root else None, root)
    assert got == [mine]
    if size > 1 and rank == 0:
        dist.send_object_list([mine], size - 1)
    elif size > 1 and rank == size - 1:
        dist.recv_object_list(got, 0)
        assert got == all_of_them[:1]


def of_group(rank: int, size: int, group: Any) -> None:
    """A group's own calls, whose defaults are async_op=True: callers wait for what they return."""
    x, total = torch.full((WIDTH,), rank + 1.0), size * (size + 1) / 2
    parts, whole = [torch.zeros(WIDTH) for _ in range(size)], torch.zeros(size * WIDTH)
    sums = dist.ReduceScatterOptions()
    calls: list[Callable[[], Any]] = [
        lambda: group.allreduce(y),
        lambda: group.allreduce([y]),
        lambda: group.allreduce_coalesced([y]),
        lambda: group.broadcast(y, size - 1),
        lambda: group.reduce(y, 0),
        lambda: group.allgather(parts, x),
        lambda: group.allgather([parts], [x]),
        lambda: group._allgather_base(whole, x),
        lambda: group.allgather_coalesced([[part] for part in parts], [x]),
        lambda: group.allgather_into_tensor_coalesced([whole], [x]),
        lambda: group.gather(parts if rank == 0 else [], x, 0),
        lambda: group.scatter(y, parts if rank == 0 else [], 0),
        lambda: group.reduce_scatter(y, parts),
        lambda: group._reduce_scatter_base(y, whole, sums),
        lambda: group.reduce_scatter_tensor_coalesced([y], [whole]),
        lambda: group.alltoall_base(whole.clone(), whole, [], []),
        lambda: group.alltoall([torch.zeros(WIDTH) for _ in parts], parts),
        group.barrier,
    ]
    for number, call in enumerate(calls):
        y = x.clone()
        assert call().wait(), number
        if number < 3:
            assert (y == total).all(), number


@contextmanager
def traced() -> Iterator[None]:
    """Records each call as torch's profiler and its execution trace do."""
    observer = torch.profiler.ExecutionTraceObserver()
    with tempfile.TemporaryDirectory() as folder:
        observer.register_callback(str(Path(folder, "trace.json")))
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=cpu, record_shapes=True, with_stack=True, execution_trace_observer=observer
        ) as profiler:
            yield
        assert any(event.name == "unisono:all_reduce" for event in profiler.events())


def waited() -> AbstractContextManager[Any]:
    """Lets torch keep the Work of each call, by its tensors."""
    return allow_inflight_collective_as_graph_input_ctx()


def without_work(store: str) -> None:
    """Every call where torch looks at what the backend returns, boxes it, or records it."""
    with world(store) as (rank, size):
        modes: list[Callable[[], AbstractContextManager[Any]]] = [
            nullcontext, Passes, CommDebugMode, traced, torch.inference_mode
        ]  # fmt: skip
        for seed, mode in enumerate(modes):
            with mode():
                public(rank, size, seed)
                objects(rank, size, seed)
                of_group(rank, size, dist.group.WORLD)
        x = torch.ones(3)
        with waited():
            dist.all_reduce(x)
            torch.ops._c10d_functional.wait_tensor(x)
            public(rank, size, len(modes))
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profiler:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
        seen = [event for event in profiler.events() if event.name == "unisono:all_reduce"]
        assert [event.input_shapes for event in seen] == [[[3]], [[3]]]
        together(rank, size, x / size**3)


def together(rank: int, size: int, ones: torch.Tensor) -> None:
    """Calls that torch's coalescing manager makes as one, and a call whose inputs nobody else keeps."""
    many, other = torch.ones(5), torch.full((2,), float(rank))
    with dist._coalescing_manager():
        dist.all_reduce(ones)
        dist.all_reduce(many)
    with dist._coalescing_manager(device=torch.device(DEVICE)):
        dist.broadcast(other, 0)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(ones)
        dist.all_reduce(many)
    manager.wait()
    part = torch.zeros(WIDTH)
    parts = list(data((size, WIDTH), torch.float32, size)) if rank == 0 else None
    work = dist.scatter(part, parts, async_op=True)
    del parts  # the call keeps them
    work.wait()
    same(part, data((size, WIDTH), torch.float32, size)[rank], "scatter")
    same(ones, torch.full((3,), float(size) ** 2), "all_reduce")
    same(many, torch.full((5,), float(size) ** 2), "all_reduce_coalesced")
    same(other, torch.zeros(2), "broadcast")


def hooked(store: str) -> None:
    """Hooks of torch 2.14 around each call, which get no Work of one that has ended."""
    with world(store) as (rank, size):
        group, seen = dist.group.WORLD, []
        group.register_post_hook(1, lambda call: seen.append((call.async_op, call.work is None)))
        public(rank, size, 1)
        dist.all_reduce(torch.ones(2), async_op=True).wait()
        group.unregister_post_hook(1)
        assert set(seen) == {(False, True), (True, False)}


def detail(store: str) -> list[str]:
    """Torch's own checks of each call, which TORCH_DISTRIBUTED_DEBUG=DETAIL turns on. Returns what they say
    of shapes and calls that differ; the group goes on."""
    with world(store) as (rank, size):
        public(rank, size, 1)
        objects(rank, size, 1)
        said = []
        for wrong in (
            lambda: dist.all_reduce(torch.ones(3 + rank)),
            lambda: dist.reduce_scatter_tensor(torch.ones(2 + rank), torch.ones((2 + rank) * size)),
            lambda: dist.broadcast(torch.ones(2), 0) if rank else dist.all_reduce(torch.ones(2)),
        ):
            with pytest.raises(RuntimeError) as error:
                wrong()
            said.append(str(error.value).splitlines()[0])
        public(rank, size, 2)
        train(2, DistributedDataParallel(model()), rank)
        return said
