"""Programs of ranks whose tensors lie in symmetric memory of a process group, for `ranks.play`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from memory_programs import mapped_bytes
from torch_ranks import data, model, train, world
from unisono.torch.distributed import empty

CPU = torch.device("cpu")


def collectives(store: str) -> None:
    """Calls on such tensors, on all ranks or some, and in parts of them, beside sums of every rank's data."""
    with world(store) as (rank, size):
        backend = dist.group.WORLD._get_backend(CPU)
        assert backend.supports_tensor_alloc(CPU)
        assert not backend.supports_tensor_alloc(torch.device("cuda", 0))
        for number, count in enumerate((1, 7, 1000, 30_001, 300_000)):
            whole = [data((size * count,), torch.float32, r, number) for r in range(size)]
            total = torch.stack(whole).double().sum(0).float()
            for owners in (range(size), range(0, size, 2)):

                def new(many: int, owners: range = owners) -> torch.Tensor:
                    made = empty(many)
                    return made if rank in owners else torch.empty(many)

                x, part, every = new(size * count), new(count), new(size * count + 3)[3:]
                x.copy_(whole[rank])
                dist.reduce_scatter_tensor(part, x)
                mine = slice(rank * count, (rank + 1) * count)
                torch.testing.assert_close(part, total[mine], rtol=1e-5, atol=1e-5)
                dist.all_gather_into_tensor(every, x[mine])
                for r, theirs in enumerate(whole):
                    block = slice(r * count, (r + 1) * count)
                    assert torch.equal(every[block], theirs[block])
                work = dist.all_reduce(x, async_op=True)
                del part, every
                assert work is not None
                work.wait()
                torch.testing.assert_close(x, total, rtol=1e-5, atol=1e-5)
        half = dist.new_group(list(range(size)))
        x = empty(100_000, torch.int64).fill_(rank)  # of the whole group, in a call of another
        dist.all_reduce(x, group=half)
        assert (x == sum(range(size))).all()
        assert empty(0).shape == (0,) and empty((3, 5), torch.bfloat16).shape == (3, 5)


def blocks(store: str) -> None:
    """Memory is used again if it is left on every rank, and is not taken from a rank that keeps it."""
    with world(store) as (rank, size):
        x = empty(50_000).fill_(1)
        first = x.data_ptr()
        view = x[10:20]
        del x
        kept = empty(50_000).fill_(2)
        assert kept.data_ptr() != first and (view == 1).all()
        del view
        again = empty(40_000).fill_(3)  # fits where x was
        assert again.data_ptr() == first
        del again
        if rank == 0:
            del kept
        for _ in range(3):
            x = empty(50_000).fill_(4)
            assert rank == 0 or (x.data_ptr() != kept.data_ptr() and (kept == 2).all())
            dist.all_reduce(x)
            assert (x == 4 * size).all()
        held = mapped_bytes()
        for step in range(20):
            several = [empty(50_000) for _ in range(2)]
            if step % size == rank:
                several.reverse()
            x = several.pop()
            dist.all_reduce(x.fill_(1))
            assert (x == size).all()
        assert mapped_bytes() <= held + 2 * size * 204_800
        large = empty(10)
        assert large.data_ptr() != first  # a block at most twice as large
        outliving = empty(1000).fill_(5)
    outliving += 1
    assert (outliving == 6).all()


def refused(store: str) -> list[str]:
    """Sizes that differ. Returns what is said; the group goes on."""
    with world(store) as (rank, size):
        said = []
        for many in (1000 + rank, 1 << 45):
            try:
                empty(many)
            except RuntimeError as error:
                said.append(str(error).splitlines()[0])
        dist.all_reduce(x := empty(3).fill_(1))
        assert x.tolist() == [size] * 3
        return said


def several_machines(store: str) -> None:
    """A group without such memory says so, and FSDP2 does without."""
    with world(store):
        backend = dist.group.WORLD._get_backend(CPU)
        assert not backend.supports_tensor_alloc(CPU)
        try:
            empty(3)
        except RuntimeError as error:
            assert "this group has no symmetric memory on cpu" in str(error)
        else:
            raise AssertionError("no error")
        _sharded(True)


def _sharded(symmetric: bool) -> tuple[list[float], list[int]]:
    """Returns the losses of FSDP2's steps, and the mapped bytes after each."""
    from torch.distributed.fsdp import fully_shard

    net = model()
    for module in (net[0], net[2], net):
        fully_shard(module)
        module.set_allocate_memory_from_process_group_for_comm(symmetric)
    bytes_mapped: list[int] = []
    losses = train(6, net, dist.get_rank(), lambda step: bytes_mapped.append(mapped_bytes()))
    return losses, bytes_mapped


def fsdp(store: str) -> None:
    """FSDP2 trains alike with such buffers and without, and takes no more of them after the first steps."""
    with world(store):
        plain, before = _sharded(False)
        symmetric, mapped = _sharded(True)
        assert symmetric == plain
        assert before[0] == before[-1] < mapped[0] and mapped[2] == mapped[-1]


def compiled(store: str) -> None:
    """A compiled function takes such tensors, with functional collectives."""
    from torch.distributed._functional_collectives import all_reduce, reduce_scatter_tensor

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = dist.group.WORLD
        return all_reduce(2 * x, "sum", group), reduce_scatter_tensor(x, "sum", 0, group)

    with world(store) as (rank, size):
        x = empty((size * 3, 5))
        x.copy_(data(tuple(x.shape), torch.float32, rank))
        expected = torch.stack([data(tuple(x.shape), torch.float32, r) for r in range(size)]).sum(0)
        whole, part = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(whole, 2 * expected)
        torch.testing.assert_close(part, expected[rank * 3 : (rank + 1) * 3])
