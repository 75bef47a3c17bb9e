"""NCCL through its own C API: `nccl` on the bench's buffers, `nccl-windows` on symmetric windows.

A window must lie in memory that NCCL can export, so `nccl-windows` has buffers of its own from ncclMemAlloc,
of the size and alignment of the bench's, and runs the symmetric cases only. `nccl` runs plain and symmetric
cases alike: it takes any pointer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.cases import DTYPES, block_elements
from unisono.bench.cuda import nccl
from unisono.bench.cuda.device import missing
from unisono.bench.cuda.memory import tensor_at
from unisono.bench.records import Case

_NO_IN_PLACE = frozenset({"all_to_all", "all_to_all_v", "send_recv"})


class NcclBackend(Backend):
    """A communicator of all ranks; every call is queued on the bench's stream."""

    name = "nccl"
    devices = ("cuda",)
    threads = True

    def __init__(self) -> None:
        self._comm: Any = None
        self._device = 0

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
        library = nccl.Library()
        made = library.unique_id() if ranks.rank == 0 else b""
        unique_id = ranks.all_gather(made)[0]
        self._device = ranks.device or 0
        self._comm = nccl.Communicator(library, ranks.rank, ranks.size, unique_id, ranks.stream)
        self._one = _one_element(self._device)

    def supports(self, case: Case) -> str | None:
        if case.placement == "in_place" and case.collective in _NO_IN_PLACE:
            return f"NCCL has no in-place {case.collective}."
        return None

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        comm, root = self._comm, case.root or 0
        x, out = _address(buffers.x), _address(buffers.out)
        dtype, op, count = nccl.DTYPES[case.dtype], nccl.OPS.get(case.op or "", 0), block_elements(case)
        match case.collective:
            case "barrier":
                one = self._one.data_ptr()
                return self._bound("ncclAllReduce", one, one, 1, nccl.DTYPES["i32"], nccl.OPS["sum"])
            case "all_reduce":
                return self._bound("ncclAllReduce", x, out, count, dtype, op)
            case "reduce":
                return self._bound("ncclReduce", x, out, count, dtype, op, root)
            case "broadcast":
                return self._bound("ncclBroadcast", x, out, count, dtype, root)
            case "all_gather":
                return self._bound("ncclAllGather", x, out, count, dtype)
            case "reduce_scatter":
                return self._bound("ncclReduceScatter", x, out, count, dtype, op)
            case "all_to_all" if comm.library.has("ncclAlltoAll"):
                return self._bound("ncclAlltoAll", x, out, count, dtype)
            case "gather" if comm.library.has("ncclGather"):
                return self._bound("ncclGather", x, out, count, dtype, root)
            case "scatter" if comm.library.has("ncclScatter"):
                return self._bound("ncclScatter", x, out, count, dtype, root)
            case _:
                return self._sends(case, buffers)

    def _bound(self, name: str, *arguments: int) -> Callable[[], object]:
        return self._comm.bound(name, *arguments)  # type: ignore[no-any-return]

    def _sends(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """What NCCL has no collective for (older ones: also gather, scatter and all_to_all), as one group."""
        comm, dtype, root = self._comm, nccl.DTYPES[case.dtype], case.root or 0
        item, n, rank, block = (
            DTYPES[case.dtype].itemsize,
            self._comm.size,
            self._comm.rank,
            block_elements(case),
        )
        x, out = _address(buffers.x), _address(buffers.out)
        sends: list[tuple[int, int, int]] = []  # address, elements, peer
        receives: list[tuple[int, int, int]] = []
        match case.collective:
            case "send_recv":
                sends, receives = [(x, block, (rank + 1) % n)], [(out, block, (rank - 1) % n)]
            case "all_to_all":
                sends = [(x + peer * block * item, block, peer) for peer in range(n)]
                receives = [(out + peer * block * item, block, peer) for peer in range(n)]
            case "all_to_all_v":
                sends = _in_a_row(x, buffers.send_counts, item)
                receives = _in_a_row(out, buffers.recv_counts, item)
            case "gather":
                sends = [(x, block, root)]
                receives = [(out + r * block * item, block, r) for r in range(n) if rank == root]
            case "scatter":
                sends = [(x + r * block * item, block, r) for r in range(n) if rank == root]
                receives = [(out, block, root)]
            case _:
                raise ValueError(f"the nccl backend has no {case.collective}.")
        calls = [comm.bound("ncclSend", *send[:2], dtype, send[2]) for send in sends if send[1]]
        calls += [comm.bound("ncclRecv", *take[:2], dtype, take[2]) for take in receives if take[1]]
        return comm.grouped(calls)  # type: ignore[no-any-return]

    def raise_if_failed(self) -> None:
        self._comm.raise_if_failed()

    def abort(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def close(self) -> None:
        if self._comm is not None:
            self._comm.close()
            self._comm = None


class NcclWindowsBackend(NcclBackend):
    """The same on symmetric windows, by which NCCL chooses its symmetric kernels where it has some."""

    name = "nccl-windows"
    own_memory = True

    def _lacks(self, library: nccl.Library) -> str | None:
        if library.has("ncclCommWindowRegister") and library.has("ncclMemAlloc"):
            return None
        return f"NCCL {library.version()} has no windows: install 2.27 or newer."

    def supports(self, case: Case) -> str | None:
        if case.memory != "symmetric":
            return "windows are symmetric memory; backend nccl runs the plain cases."
        return super().supports(case)

    def allocate(self, size: int) -> tuple[Any, Any]:
        x, out = (tensor_at(self._comm.window(size), size, self._device, self._comm) for _ in range(2))
        return x, out


def _one_element(device: int) -> Any:
    import torch

    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")


def _address(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())


def _in_a_row(start: int, counts: tuple[int, ...], item: int) -> list[tuple[int, int, int]]:
    """(address, elements, peer) of blocks that lie behind each other."""
    found, at = [], start
    for peer, count in enumerate(counts):
        found.append((at, count, peer))
        at += count * item
    return found
