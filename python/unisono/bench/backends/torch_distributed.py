"""torch.distributed as a program calls it, with the backend `unisono` or `gloo` below.

Backend unisono calls the communicator itself: torch-unisono takes longer by what torch and the adapter add.
Calls have torch's own form: all_reduce, reduce and broadcast in place, the others from one tensor to another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.bench import pairs
from unisono.bench.backends import matmuls, sends, torch_group
from unisono.bench.backends.base import Buffers, Ranks
from unisono.bench.backends.gloo import GlooBackend, reduce_ops
from unisono.records import Case

IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})


class TorchGlooBackend(GlooBackend):
    """A process group of torch's, over gloo."""

    name = "torch-gloo"
    backend = "gloo"
    asked_for = True
    moe = norm = False

    def setup(self, ranks: Ranks) -> None:
        import torch

        torch.set_num_threads(1)  # one rank is one core, as for the other backends
        self._ops = reduce_ops()
        self._group = torch_group.new_group(ranks, self.backend)

    def supports(self, case: Case) -> str | None:
        if (case.placement == "in_place") != (case.collective in IN_PLACE):
            return f"torch.distributed has no {case.collective} {case.placement.replace('_', ' ')}."
        if case.matmul is not None:
            return matmuls.uneven(case)
        if case.streams:
            return "the all_to_all of sends is measured with the backend gloo."
        return self._lacks(case)

    def _lacks(self, case: Case) -> str | None:
        """Returns why the backend of torch cannot make the case, or None."""
        return super().supports(case)

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        import torch.distributed as dist

        if case.matmul is not None:
            return super().prepare(case, buffers)
        group, n, root = self._group, self._group.size(), case.root
        x, out = self.tensor(buffers.x, case), self.tensor(buffers.out, case)
        both = x if out is None else out  # of a call in place
        op = None if case.op is None else self._ops[case.op]
        match case.collective:
            case "barrier":
                return partial(dist.barrier, group)
            case "all_reduce":
                return partial(dist.all_reduce, both, op, group)
            case "reduce":
                return partial(dist.reduce, both, root, op, group)
            case "broadcast":
                return partial(dist.broadcast, both, root, group)
            case "all_gather":
                return partial(dist.all_gather_into_tensor, out, x, group)
            case "reduce_scatter":
                return partial(dist.reduce_scatter_tensor, out, x, op, group)
            case "gather":
                return partial(dist.gather, x, None if out is None else list(out.chunk(n)), root, group)
            case "scatter":
                return partial(dist.scatter, out, None if x is None else list(x.chunk(n)), root, group)
            case "all_to_all" | "all_to_all_v":
                splits = list(buffers.recv_counts) or None, list(buffers.send_counts) or None
                return partial(dist.all_to_all_single, out, x, *splits, group)
            case _:
                return self._messages(case, x, out)

    def _collectives(self) -> matmuls.Collectives:
        import torch.distributed as dist

        def bound(call: Callable[..., object], *args: object) -> Callable[[], object]:
            return partial(call, *args, group=self._group)

        return matmuls.Collectives(
            partial(bound, dist.all_gather_into_tensor),
            partial(bound, dist.reduce_scatter_tensor),
            partial(bound, dist.all_reduce),
        )

    def _messages(self, case: Case, x: Any, out: Any) -> Callable[[], object]:
        """Returns the call of a send_recv or a ping-pong."""
        import torch.distributed as dist

        group, rank, n = self._group, self._group.rank(), self._group.size()
        if case.collective == "send_recv":
            return self._exchange(x, (rank + 1) % n, out, (rank - 1) % n)
        peer = pairs.peer_of(case, rank)
        if case.pattern == "bidirectional":
            return self._exchange(x, peer, out, peer)
        verbs = {"send": partial(dist.send, x, peer, group), "recv": partial(dist.recv, out, peer, group)}
        return sends.pingpong(case, rank, verbs.__getitem__)

    def _exchange(self, x: Any, to: int | None, out: Any, source: int | None) -> Callable[[], object]:
        import torch.distributed as dist

        group = self._group
        messages = [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, out, source, group)]

        def call() -> None:
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        return call

    def close(self) -> None:
        if self._group is not None:
            self._group = None
            torch_group.leave()


class TorchUnisonoBackend(TorchGlooBackend):
    """A process group of torch's, over Unisono."""

    name = "torch-unisono"
    backend = "unisono"
    bit_exact = True
    own_threads = False  # a call that is waited for runs in the caller's thread

    def setup(self, ranks: Ranks) -> None:
        import unisono_torch

        unisono_torch.register()
        super().setup(ranks)

    def _lacks(self, case: Case) -> str | None:
        if case.op is not None and case.dtype == "f8e5m2":
            return "Unisono's backend of torch.distributed has no reduction of f8e5m2."
        return None

    @staticmethod
    def tensor(array: Any, case: Case) -> Any:
        import torch

        tensor = TorchGlooBackend.tensor(array, case)
        if tensor is not None and case.op is not None and case.dtype == "f8e4m3":
            return tensor.view(torch.float8_e4m3fn)
        return tensor
