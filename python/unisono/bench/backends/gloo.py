"""Gloo, by the methods of torch's process group, without the Python layers of torch.distributed above it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from unisono.bench import pairs, routes
from unisono.bench.backends import matmuls, norms, sends
from unisono.bench.backends.base import Backend, Buffers, Ranks, moe_call
from unisono.bench.backends.permutation import Scratch
from unisono.bench.backends.torch_moe import TorchMoe
from unisono.bench.cases import Array
from unisono.gloo import make_group
from unisono.records import Case, vocabulary
from unisono.records.vocabulary import INTEGERS, KNOWN

TIMEOUT_S = 120.0
_IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter"})


class GlooBackend(Backend):
    """A gloo group over TCP, by loopback on one host, else by the interface to the other hosts."""

    name = "gloo"
    own_threads = point_to_point = moe = norm = matmul = True

    def __init__(self) -> None:
        self._group: Any = None
        self._scratch = Scratch()  # of mixture of experts

    def available(self, ranks: int) -> str | None:
        if not find_spec("torch"):
            return "torch is not installed: pip install torch."
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_gloo_available():
            return "this build of torch has no gloo: install one from PyPI."
        return None

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def setup(self, ranks: Ranks) -> None:
        import torch

        torch.set_num_threads(1)  # one rank is one core, as for the other backends
        self._group, _ = make_group(ranks.rank, ranks.size, ranks.all_gather, TIMEOUT_S)
        self._group.barrier().wait()
        self._ops = reduce_ops()

    def supports(self, case: Case) -> str | None:
        if case.collective == "send_recv" and case.ranks == 1:
            return "gloo cannot send to itself."
        if case.op is not None and case.dtype.startswith("f8"):
            return f"gloo has no reduction of {case.dtype}."
        if case.op == "avg" and case.dtype in INTEGERS:
            return "gloo has no average of integers."
        if case.placement == "in_place" and case.collective not in _IN_PLACE:
            return f"gloo has no in-place {case.collective}."
        return None if case.matmul is None else matmuls.uneven(case)

    @staticmethod
    def tensor(array: Array | None, case: Case) -> Any:
        """Returns the same memory as a flat tensor; of bytes for fp8, which gloo does not know."""
        import torch

        if array is None:
            return None
        flat = array.reshape(-1)
        if case.dtype == "bf16":
            return torch.from_numpy(flat.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(flat.view(np.uint8) if case.dtype.startswith("f8") else flat)

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        if case.norm is not None:
            return norms.by_torch(case, buffers, self.tensor, lambda one: partial(self._summed, one))
        if case.matmul is not None:
            of = matmuls.tensors(case, self._group.rank(), buffers, self.tensor)
            return matmuls.by_torch(case, of, self._collectives())
        if case.moe is None:
            return self._bound(case, buffers)
        return moe_call(case, GlooMoe(self._group, case, buffers, self._scratch, self.tensor))

    def _bound(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Returns gloo's own call on these buffers."""
        import torch.distributed as dist

        group, rank, n = self._group, self._group.rank(), self._group.size()
        x, out = self.tensor(buffers.x, case), self.tensor(buffers.out, case)
        match case.collective:
            case "barrier":
                return self._waited(group.barrier)
            case "all_reduce" | "reduce" | "broadcast":
                return self._one_buffer(case, buffers)
            case "all_gather":
                return self._waited(group._allgather_base, out, x)
            case "gather":
                gather = dist.GatherOptions()
                gather.rootRank = case.root
                return self._waited(
                    group.gather, [list(out.chunk(n))] if out is not None else [], [x], gather
                )
            case "reduce_scatter":
                reduce = dist.ReduceScatterOptions()
                reduce.reduceOp = self._ops[str(case.op)]
                return self._waited(group._reduce_scatter_base, out, x, reduce)
            case "scatter":
                scatter = dist.ScatterOptions()
                scatter.rootRank = case.root
                return self._waited(
                    group.scatter, [out], [list(x.chunk(n))] if x is not None else [], scatter
                )
            case "all_to_all" if case.streams:
                return self._all_to_all(x.chunk(n), out.chunk(n), buffers)
            case "all_to_all":
                return self._waited(group.alltoall_base, out, x, [], [])
            case "all_to_all_v":
                recv, send = list(buffers.recv_counts), list(buffers.send_counts)
                return self._waited(group.alltoall_base, out, x, recv, send)
            case "send_recv":
                return self._exchange([x], (rank + 1) % n, [out], (rank - 1) % n)
            case vocabulary.PINGPONG:
                peer = pairs.peer_of(case, rank)
                verbs = {
                    "send": self._waited(group.send, [x], peer, 0),
                    "recv": self._waited(group.recv, [out], peer, 0),
                    "exchange": self._exchange([x], peer, [out], peer),
                }
                return sends.pingpong(case, rank, verbs.__getitem__)
            case _:
                raise ValueError(f"the gloo backend has no {case.collective}.")

    def _exchange(
        self, sent: list[Any], to: int | None, received: list[Any], source: int | None
    ) -> Callable[[], object]:
        group = self._group

        def call() -> None:
            sending = group.send(sent, to, 0)
            group.recv(received, source, 0).wait()
            sending.wait()

        return call

    def _all_to_all(self, x: Any, out: Any, buffers: Buffers) -> Callable[[], object]:
        """Returns a call that starts every send and receive, then waits for all. The call copies the own
        block, since gloo cannot send to itself."""
        group, rank, n = self._group, self._group.rank(), self._group.size()
        peers = [([x[to]], to, [out[source]], source) for to, source in sends.steps(rank, n)]
        keep = sends.own_block(buffers.x, buffers.out, rank)

        def call() -> None:
            started = [group.recv(take, source, 0) for _, _, take, source in peers]
            started += [group.send(give, to, 0) for give, to, _, _ in peers]
            keep()
            for work in started:
                work.wait()

        return call

    def _collectives(self) -> matmuls.Collectives:
        group = self._group
        return matmuls.Collectives(
            partial(self._waited, group._allgather_base),
            partial(self._waited, group._reduce_scatter_base),
            lambda tensor: partial(self._summed, tensor),
        )

    def _summed(self, tensor: Any) -> None:
        """Sums a tensor over the ranks, in place."""
        self._group.allreduce([tensor]).wait()

    @staticmethod
    def _waited(start: Callable[..., Any], *args: object) -> Callable[[], object]:
        begin = partial(start, *args)

        def call() -> None:
            begin().wait()

        return call

    def _one_buffer(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Returns a reduction or broadcast. Gloo works in place, and its reduce overwrites the input of every
        rank. Out of place, the copy that keeps the input is therefore part of the call."""
        import torch.distributed as dist

        known, source = KNOWN[case.collective], buffers.x
        target = (
            buffers.out
            if buffers.out is not None
            else (buffers.x if case.placement == "in_place" else buffers.spare)
        )
        options: Any
        if case.collective == "all_reduce":
            options, start = dist.AllreduceOptions(), self._group.allreduce
        elif case.collective == "reduce":
            options, start = dist.ReduceOptions(), self._group.reduce
        else:
            options, start = dist.BroadcastOptions(), self._group.broadcast
        if known.rooted:
            options.rootRank = case.root
        if known.reduces:
            options.reduceOp = self._ops[str(case.op)]
        begin = partial(start, [self.tensor(target, case)], options)
        copies = case.placement == "out_of_place" and (known.reduces or self._group.rank() == case.root)
        if not copies:
            return self._waited(begin)
        assert source is not None and target is not None

        def call() -> None:
            np.copyto(target, source)
            begin().wait()

        return call

    def close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._group.shutdown()
            self._group = None


def reduce_ops() -> dict[str, Any]:
    """Returns torch's names of the bench's ops."""
    from torch.distributed import ReduceOp

    renamed = {"prod": "PRODUCT"}
    return {op: getattr(ReduceOp, renamed.get(op, op.upper())) for op in vocabulary.OPS}


class GlooMoe(TorchMoe):
    """A dispatch begins with an all_gather of the routes. `tensor` returns an array of a case as a flat
    tensor on the same memory."""

    def __init__(
        self, group: Any, case: Case, buffers: Buffers, scratch: Scratch, tensor: Callable[[Any, Case], Any]
    ) -> None:
        import torch

        hidden = routes.shape(case).hidden

        def rows_of(array: Any) -> Any:
            return None if array is None else tensor(array, case).view(-1, hidden)

        super().__init__(group.rank(), case, buffers, scratch, rows_of, torch.from_numpy)
        self._group = group
        self._gathered = torch.from_numpy(self._all).view(-1), torch.from_numpy(self._mine).view(-1)

    def gather(self) -> None:
        self._group._allgather_base(*self._gathered).wait()

    def exchange(self, x: Any, counts: list[int], out: Any, out_counts: list[int]) -> None:
        self._group.alltoall_base(out, x, out_counts, counts).wait()

    def dispatch(self) -> None:
        self.route()
        super().dispatch()

    def combine(self) -> None:
        super().combine()
        self._out.copy_(self._sums)
