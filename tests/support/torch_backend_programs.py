"""Programs of ranks that train by the backend `unisono`, die, fork or misuse it, for `ranks.play`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_ranks import DEVICE, data, model, train, world


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


def total(group: Any, of: float) -> float:
    """Returns the sum over a group's ranks."""
    x = torch.full((300,), of)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, x[:1].expand(300))
    return x[0].item()


def split(store: str) -> None:
    """Groups split off by the method that torch's split_group calls, of a group and of one split off."""
    with world(store) as (rank, size):
        whole = dist.group.WORLD
        assert whole is not None and whole._get_backend(torch.device("cpu")).supports_splitting
        if DEVICE == "cpu":
            with pytest.raises(RuntimeError, match="No device associated with the default pg"):
                dist.split_group(split_ranks=[[0]])  # torch wants an accelerator before it asks the backend
        pending = dist.all_reduce(torch.ones(5), async_op=True)
        rest = list(range(1, size))
        halves = [whole.split_group([0] if rank == 0 else rest, group_name=f"half {i}") for i in range(2)]
        pending.wait()
        for half in halves:
            assert half.size() == (1 if rank == 0 else len(rest)) and half.rank() == max(0, rank - 1)
            backend = half._get_backend(torch.device("cpu"))
            assert backend is half._get_backend(torch.device("cuda")) and backend.name() == "unisono"
            x = torch.full((3,), float(rank))
            half.allreduce([x]).wait()
            assert x[0].item() == (0 if rank == 0 else sum(rest))
            sparse = torch.eye(3, device="cpu")[rank].to_sparse()  # which the new group's gloo carries
            half.allreduce([sparse]).wait()
            assert sparse.to_dense().sum() == (1 if rank == 0 else len(rest))
        within = halves[0].split_group([half.size() - 1], group_name="last")  # of ranks there
        assert (within is None) == (rank in rest[:-1])
        outsider = whole.split_group([0, size - 1], timeout=timedelta(seconds=7), group_name="ends")
        assert (outsider is None) == (0 < rank < size - 1)
        if outsider is not None:
            assert outsider._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
            x = torch.ones(2)
            outsider.allreduce([x]).wait()
            assert x[0].item() == 2
        assert whole._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60)
        del half, halves, within, outsider
        assert total(whole, 1) == size


def split_by_mesh(store: str) -> None:
    """torch's split_group and DeviceMesh, as with a device_id. On CPUs torch is told that they are an
    accelerator, without which it splits no group."""
    with world(store, bound=DEVICE == "cuda") as (rank, size), pytest.MonkeyPatch.context() as patch:
        whole = dist.group.WORLD
        assert whole is not None
        if DEVICE == "cpu":
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            patch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
            whole.bound_device_id = torch.device("cpu", 0)
        for _ in range(2):  # the same ranks again, in the same store
            mesh = dist.init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("rows", "columns"))
            row, column = mesh.get_group("columns"), mesh.get_group("rows")
            assert row.group_desc == "mesh_columns" and dist.get_backend(row) == "unisono"
            of_row = [r for r in range(size) if r // (size // 2) == rank // (size // 2)]
            assert dist.get_process_group_ranks(row) == of_row
            assert total(row, rank) == sum(of_row)
            assert total(column, rank) == sum(range(rank % (size // 2), size, size // 2))
            dist.destroy_process_group(row)
            dist.destroy_process_group(column)
        group = dist.split_group(split_ranks=[[0, 1]], timeout=timedelta(seconds=9))
        assert (group in (None, dist.GroupMember.NON_GROUP_MEMBER)) == (rank > 1)
        if rank < 2:
            assert total(group, rank + 1) == 3
            assert group._get_backend(torch.device(DEVICE)).options._timeout == timedelta(seconds=9)
        if DEVICE == "cpu":  # whose number no group takes when it is made
            dist.distributed_c10d._get_split_source(whole).perform_nocolor_split(whole.bound_device_id)
        else:
            last = dist.new_group([size - 1])  # torch tells the backend of the others
            if rank == size - 1:
                assert total(last, 5) == 5
        assert total(whole, 1) == size


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
        replicated = DistributedDataParallel(plain, process_group=peer)
        theirs = train(3, replicated, rank)
        torch.testing.assert_close(losses, theirs, rtol=1e-4, atol=1e-5)
        if DEVICE != "cpu":
            return
        for layer in (net[0], net[2], net):
            layer.set_gradient_divide_factor(2.5)  # which FSDP2 divides by in a premultiplied sum
        for module in (net, replicated):
            module.zero_grad()
            module(data((16, 20), torch.float32, rank, 9)).square().mean().backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            mean = other.grad
            torch.testing.assert_close(mine.grad.full_tensor(), mean * (size / 2.5), rtol=1e-3, atol=1e-4)


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


def late(store: str) -> str:
    """Sets the group's timeout. Returns the error of the rank that waits, and nothing on the late one."""
    with world(store) as (rank, size):
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(RuntimeError, match="the timeout of a group is 0 ms: it must be above 0"):
            group.set_timeout(timedelta(0))
        if torch.__version__ < (2, 14):  # whose own function knows torch's backends alone
            with pytest.warns(UserWarning, match="only supported for either nccl or gloo"):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
            group.set_timeout(timedelta(seconds=2))
        else:
            dist.distributed_c10d.set_timeout(timedelta(seconds=2), group)
        total = torch.ones(3)
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((3,), float(size)))
        told = dist.FileStore(f"{store}-told", size)
        if rank == 1:
            told.wait(["told"])
            return ""
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(total)
        told.set("told", "")
        return str(error.value)


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
    """A rank that torchrun has started, and starts again after one was killed in a step of DDP."""
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first:  # torchrun ends the other ranks, which might not come to name the one that was killed
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def after(step: int) -> None:
        if rank == 1 and step == 1 and first:
            os.kill(os.getpid(), signal.SIGKILL)

    train(4, DistributedDataParallel(model()), rank, after)
    dist.all_reduce(x := torch.ones(3))
    print(f"sum of {dist.get_backend()} {int(x[0])}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    by_torchrun()
    sys.exit(0)
