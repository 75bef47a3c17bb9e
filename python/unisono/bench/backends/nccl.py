"""NCCL, by its C API: `nccl` on the bench's buffers, `nccl-windows` on symmetric windows.

A window must lie in memory that NCCL can export. `nccl-windows` therefore has buffers of its own from
ncclMemAlloc, of the size and alignment of the bench's, and runs only the symmetric cases. `nccl` takes any
pointer, and runs plain and symmetric cases.

Each backend has a communicator for collectives on rings, one for exchanges of all pairs and one for gather
and scatter. On a single communicator of NCCL 2.28.9, a broadcast or all_reduce of megabytes after a scatter
hung (in a graph of calls on unisono's symmetric memory, and in single calls on windows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from unisono import nccl
from unisono.bench import pairs, routes
from unisono.bench.backends import matmuls, norms, sends
from unisono.bench.backends.base import Backend, Buffers, Ranks, moe_call
from unisono.bench.backends.permutation import Scratch
from unisono.bench.backends.torch_moe import TorchMoe
from unisono.bench.cases import block_elements
from unisono.bench.cuda.device import missing
from unisono.bench.cuda.memory import device_region, tensor_at, tensor_of
from unisono.bench.cuda.streams import Fork
from unisono.bench.cuda.temporaries import Temporaries
from unisono.records import Case, vocabulary
from unisono.records.vocabulary import DTYPES

Call = Callable[[], object]
Message = tuple[int, int, int]  # address, elements, peer
_KINDS = ("ring", "pairs", "rooted")
_KIND_OF = {"gather": "rooted", "scatter": "rooted"} | dict.fromkeys(
    ("all_to_all", "all_to_all_v", "send_recv", vocabulary.PINGPONG), "pairs"
)
_NO_IN_PLACE = frozenset({"all_to_all", "all_to_all_v", "send_recv"})


class NcclBackend(Backend):
    """Calls on NCCL communicators of all ranks, queued on the bench's stream."""

    name = "nccl"
    devices = ("cuda",)
    threads = True
    point_to_point = moe = norm = matmul = True

    def __init__(self) -> None:
        self._library: Any = None
        self._comms: dict[str, nccl.Communicator] = {}
        self._device = 0
        self._ranks: Ranks | None = None
        self._fork: Fork | None = None
        self._scratch: Scratch | None = None  # of mixture of experts
        self._temporaries: Temporaries | None = None  # of those, and of norms

    def available(self, ranks: int) -> str | None:
        why = missing()
        if why is not None:
            return why
        try:
            return self._lacks(nccl.Library())
        except nccl.NcclError as error:
            return str(error)

    def _lacks(self, library: nccl.Library) -> str | None:
        return None

    def version(self) -> str:
        return f"NCCL {nccl.Library().version()}"

    def setup(self, ranks: Ranks) -> None:
        self._library = nccl.Library()
        self._device = ranks.device or 0
        self._ranks = ranks
        for kind in _KINDS:
            self._add(kind, ranks.stream)
        self._one = _one_element(self._device)

    def _add(self, name: str, stream: int) -> nccl.Communicator:
        """Adds a communicator of all ranks, for calls on `stream`, and returns it. Collective."""
        assert self._ranks is not None
        rank, size = self._ranks.rank, self._ranks.size
        unique_id = self._ranks.all_gather(self._library.unique_id() if rank == 0 else b"")[0]
        self._comms[name] = nccl.Communicator(self._library, rank, size, unique_id, stream)
        return self._comms[name]

    def expect(self, cases: Sequence[Case]) -> None:
        """Makes the memory of mixture of experts and norms, which graphs keep the addresses of."""
        if self.norm and any(case.norm is not None for case in cases):
            self._temporaries = Temporaries()
        wanted = [case for case in cases if case.moe is not None and case.ranks > 1]
        if wanted and self.moe:
            assert self._ranks is not None
            self._scratch = Scratch(partial(device_region, device=self._device))
            self._temporaries = self._temporaries or Temporaries()
            for case in wanted:
                self._scratch.of(case, self._ranks.rank)

    def supports(self, case: Case) -> str | None:
        if case.moe is not None and case.ranks == 1:
            return "alone it has nothing to exchange: backend torch permutes."
        if case.placement == "in_place" and case.collective in _NO_IN_PLACE:
            return f"NCCL has no in-place {case.collective}."
        if case.op == "avg" and case.dtype in ("i8", "u8"):
            return f"NCCL adds the {case.dtype} of an average in 8 bits, where they overflow."
        return None if case.matmul is None else matmuls.uneven(case)

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        if case.norm is not None:
            assert self._temporaries is not None
            flat, summed = (lambda tensor, _: tensor.reshape(-1)), partial(self._sum, case)
            return self._temporaries.bound(norms.by_torch(case, buffers, flat, summed))
        if case.matmul is not None:
            of = matmuls.tensors(case, self._comms["ring"].rank, buffers, lambda tensor, _: tensor)
            return matmuls.by_torch(case, of, self._collectives(case.dtype))
        if case.moe is None:
            return self._bound(case, buffers)
        assert self._scratch is not None and self._temporaries is not None
        calls = NcclMoe(self._comms["pairs"], case, buffers, self._scratch)
        return self._temporaries.bound(moe_call(case, calls))

    def _collectives(self, dtype: str) -> matmuls.Collectives:
        comm, kind, op = self._comms["ring"], nccl.DTYPES[dtype], nccl.OPS["sum"]

        def gathered(whole: Any, part: Any) -> Call:
            return comm.bound("ncclAllGather", part.data_ptr(), whole.data_ptr(), part.numel(), kind)

        def scattered(part: Any, whole: Any) -> Call:
            return comm.bound("ncclReduceScatter", whole.data_ptr(), part.data_ptr(), part.numel(), kind, op)

        def summed(tensor: Any) -> Call:
            at = tensor.data_ptr()
            return comm.bound("ncclAllReduce", at, at, tensor.numel(), kind, op)

        return matmuls.Collectives(gathered, scattered, summed)

    def _sum(self, case: Case, tensor: Any) -> Call:
        """Returns a sum over the ranks in place."""
        return self._collectives(case.dtype).all_reduce(tensor)

    def _bound(self, case: Case, buffers: Buffers) -> Call:
        comm, root = self._comms[_KIND_OF.get(case.collective, "ring")], case.root or 0
        # The same call on every rank: one without a buffer gives a place that NCCL does not touch.
        x, out = _address(buffers.x_place), _address(buffers.out_place)
        dtype, op, count = nccl.DTYPES[case.dtype], nccl.OPS.get(case.op or "", 0), block_elements(case)
        match case.collective:
            case "barrier":
                one = self._one.data_ptr()
                return comm.bound("ncclAllReduce", one, one, 1, nccl.DTYPES["i32"], nccl.OPS["sum"])
            case "all_reduce":
                return comm.bound("ncclAllReduce", x, out, count, dtype, op)
            case "reduce":
                return comm.bound("ncclReduce", x, out, count, dtype, op, root)
            case "broadcast":
                return comm.bound("ncclBroadcast", x, out, count, dtype, root)
            case "all_gather":
                return comm.bound("ncclAllGather", x, out, count, dtype)
            case "reduce_scatter":
                return comm.bound("ncclReduceScatter", x, out, count, dtype, op)
            case vocabulary.PINGPONG:
                return self._pingpong(comm, case, buffers)
            case "all_to_all" if case.streams == "per-peer":
                return self._on_streams(case, buffers)
            case "all_to_all" if case.streams is None and comm.library.has("ncclAlltoAll"):
                return comm.bound("ncclAlltoAll", x, out, count, dtype)
            case "gather" if comm.library.has("ncclGather"):
                return comm.bound("ncclGather", x, out, count, dtype, root)
            case "scatter" if comm.library.has("ncclScatter"):
                return comm.bound("ncclScatter", x, out, count, dtype, root)
            case _:
                return self._sends(comm, case, buffers)

    @staticmethod
    def _pingpong(comm: nccl.Communicator, case: Case, buffers: Buffers) -> Callable[[], object]:
        dtype, count, peer = nccl.DTYPES[case.dtype], block_elements(case), pairs.peer_of(case, comm.rank)
        send = comm.bound("ncclSend", _address(buffers.x), count, dtype, peer)
        recv = comm.bound("ncclRecv", _address(buffers.out), count, dtype, peer)
        verbs = {"send": send, "recv": recv, "exchange": comm.grouped([send, recv])}
        return sends.pingpong(case, comm.rank, verbs.__getitem__)

    def _on_streams(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Returns an all_to_all: a group of one send and one receive on each peer's stream and communicator.
        Makes streams and communicators in its first call. Collective."""
        assert self._ranks is not None
        rank, n = self._ranks.rank, self._ranks.size
        if self._fork is None:
            self._fork = Fork(n - 1)
            for index, stream in enumerate(self._fork.handles):
                self._add(f"peer {index}", stream)
        dtype, count, calls = nccl.DTYPES[case.dtype], block_elements(case), []
        for index, (to, source) in enumerate(sends.steps(rank, n)):
            comm = self._comms[f"peer {index}"]
            send = comm.bound("ncclSend", _address(buffers.x[to]), count, dtype, to)
            recv = comm.bound("ncclRecv", _address(buffers.out[source]), count, dtype, source)
            calls.append(comm.grouped([send, recv]))
        return sends.in_turn([self._fork.bound(calls), sends.own_block(buffers.x, buffers.out, rank)])

    @staticmethod
    def _sends(comm: nccl.Communicator, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Returns a collective that this NCCL lacks (before 2.28 also gather, scatter and all_to_all), as one
        group of sends and receives."""
        dtype, root = nccl.DTYPES[case.dtype], case.root or 0
        item, n, rank = DTYPES[case.dtype].itemsize, comm.size, comm.rank
        block = block_elements(case)
        x, out = _address(buffers.x), _address(buffers.out)
        gives: list[Message] = []
        takes: list[Message] = []
        match case.collective:
            case "send_recv":
                gives, takes = [(x, block, (rank + 1) % n)], [(out, block, (rank - 1) % n)]
            case "all_to_all":
                gives = [(x + peer * block * item, block, peer) for peer in range(n)]
                takes = [(out + peer * block * item, block, peer) for peer in range(n)]
            case "all_to_all_v":
                gives = _in_a_row(x, buffers.send_counts, item)
                takes = _in_a_row(out, buffers.recv_counts, item)
            case "gather":
                gives = [(x, block, root)]
                takes = [(out + r * block * item, block, r) for r in range(n) if rank == root]
            case "scatter":
                gives = [(x + r * block * item, block, r) for r in range(n) if rank == root]
                takes = [(out, block, root)]
            case _:
                raise ValueError(f"the nccl backend has no {case.collective}.")
        return _group(comm, dtype, gives, takes)

    def raise_if_failed(self) -> None:
        for comm in self._comms.values():
            comm.raise_if_failed()

    def abort(self) -> None:
        comms, self._comms = self._comms, {}
        for comm in comms.values():
            comm.abort()

    def close(self) -> None:
        comms, self._comms = self._comms, {}
        for comm in comms.values():
            comm.close()


class NcclWindowsBackend(NcclBackend):
    """Calls on symmetric windows, for which NCCL chooses its symmetric kernels if it has any."""

    name = "nccl-windows"
    own_memory, moe, norm, matmul = True, False, False, False

    def __init__(self) -> None:
        super().__init__()
        self._memory: list[int] = []

    def _lacks(self, library: nccl.Library) -> str | None:
        if library.has("ncclCommWindowRegister") and library.has("ncclMemAlloc"):
            return None
        return f"NCCL {library.version()} has no windows: install 2.27 or newer."

    def supports(self, case: Case) -> str | None:
        if case.memory != "symmetric":
            return "windows are symmetric memory; backend nccl runs the plain cases."
        if case.streams == "per-peer":
            return "its windows belong to the communicator for all pairs, not to one per peer."
        return super().supports(case)

    def allocate(self, size: int) -> tuple[Any, Any]:
        assert self._ranks is not None
        for _ in range(2):
            self._memory.append(self._library.allocate(size))
        self._ranks.all_gather(b"")  # all ranks have memory now: a registration waits for every rank
        for address in self._memory:
            for comm in self._comms.values():
                comm.register(address, size)
        x, out = (tensor_at(address, size, self._device, None) for address in self._memory)
        return x, out

    def close(self) -> None:
        aborted = not self._comms
        super().close()
        for address in self._memory:
            if not aborted:  # else the windows are still registered
                self._library.free(address)
        self._memory.clear()


class NcclMoe(TorchMoe):
    """Rows are exchanged by a group of sends and receives, as torch's all_to_all_single makes it. Routes and
    counts are known beforehand: otherwise the host would wait for them in each dispatch."""

    def __init__(self, comm: nccl.Communicator, case: Case, buffers: Buffers, scratch: Scratch) -> None:
        index = partial(tensor_of, device=buffers.x.device)
        super().__init__(comm.rank, case, buffers, scratch, lambda array: array, index)
        self._comm, self._row_bytes = comm, self._send.element_size() * routes.shape(case).hidden
        self._bound = cache(self._bind)
        self._routes = routes.of(case)
        self.route()

    def route(self) -> None:
        self.follow(self._routes.experts, self._routes.weights)
        self.bags()

    def exchange(self, x: Any, counts: list[int], out: Any, out_counts: list[int]) -> None:
        self._bound(x.data_ptr(), tuple(counts), out.data_ptr(), tuple(out_counts))()

    def _bind(self, x: int, counts: tuple[int, ...], out: int, out_counts: tuple[int, ...]) -> Call:
        size = self._row_bytes
        gives = _in_a_row(x, [rows * size for rows in counts], 1)
        takes = _in_a_row(out, [rows * size for rows in out_counts], 1)
        return _group(self._comm, nccl.DTYPES["u8"], gives, takes)

    def summed(self) -> Any:
        return self._sums


def _one_element(device: int) -> Any:
    import torch

    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")


def _address(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())


def _group(comm: nccl.Communicator, dtype: int, gives: list[Message], takes: list[Message]) -> Call:
    """Returns all sends and receives as one group."""
    calls = [comm.bound("ncclSend", *send[:2], dtype, send[2]) for send in gives if send[1]]
    calls += [comm.bound("ncclRecv", *take[:2], dtype, take[2]) for take in takes if take[1]]
    return comm.grouped(calls)


def _in_a_row(start: int, counts: Sequence[int], item: int) -> list[Message]:
    """Returns the messages of consecutive blocks from `start` on."""
    found, at = [], start
    for peer, count in enumerate(counts):
        found.append((at, count, peer))
        at += count * item
    return found
