"""Intel oneCCL on CPUs, by the C API of libccl.so.2, which is NCCL's with other names.

Unless the user sets CCL_ATL_TRANSPORT, messages go over libfabric, which needs no launcher. They go by its
shared memory unless the user sets CCL_ATL_SHM=0, with which oneCCL takes TCP. A rank has one thread unless
the user sets CCL_WORKER_OFFLOAD=1. A wait has no deadline.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.nccl import DTYPES, OPS
from unisono.records import Case

ID_BYTES = 4096
LIBRARY, PLUGIN = "libccl.so.2", "libccl_legacy_cpu.so"  # of `oneccl`; they need libccl.so.1 of `oneccl-cpu`
IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})
CALLS = {
    "all_reduce": "onecclAllReduce",
    "reduce": "onecclReduce",
    "broadcast": "onecclBroadcast",
    "all_gather": "onecclAllGather",
    "reduce_scatter": "onecclReduceScatter",
    "scatter": "onecclScatter",
    "all_to_all": "onecclAllToAll",
}


class UniqueId(ctypes.Structure):
    """onecclUniqueId, which oneCCL takes by value."""

    _fields_ = (("data", ctypes.c_byte * ID_BYTES),)


class OneCclBackend(Backend):
    """The plug-in of oneCCL for CPUs. Calls with a null stream return when they are complete."""

    name = "oneccl"
    asked_for = True

    def __init__(self) -> None:
        self._comm = ctypes.c_void_p()

    def available(self, ranks: int) -> str | None:
        if _folder() is not None:
            return None
        command = f"pip install --no-deps --prefix {Path(sys.prefix) / 'oneccl'}"
        return f"oneCCL is not installed: {command} oneccl, then the same of oneccl-cpu; or set ONECCL_ROOT."

    def version(self) -> str:
        code = ctypes.c_int()
        self._check("onecclGetVersion", ctypes.byref(code))
        numbers = f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"
        return f"oneCCL {numbers}, transport {_transport()}"

    def setup(self, ranks: Ranks) -> None:
        if len(ranks.communicator.nodes) > 1:
            raise RuntimeError("its ranks must be on one machine.")
        os.environ |= {"CCL_PROCESS_LAUNCHER": "none", "CCL_LOCAL_RANK": str(ranks.rank)}
        os.environ["CCL_LOCAL_SIZE"] = str(ranks.size)
        mine = UniqueId()
        if ranks.rank == 0:
            self._check("onecclGetUniqueId", ctypes.byref(mine))
        common = UniqueId.from_buffer_copy(ranks.all_gather(bytes(mine) if ranks.rank == 0 else b"")[0])
        out = ctypes.byref(self._comm)
        self._check("onecclCommInitRank", out, ctypes.c_size_t(ranks.size), common, ranks.rank)

    def supports(self, case: Case) -> str | None:
        if case.collective not in CALLS:
            return f"the bench calls no {case.collective} of oneCCL."
        if case.op is not None and (case.op == "avg" or case.dtype.startswith("f8")):
            return "oneCCL has no average on CPUs, and no reduction of 8-bit floats."
        if case.placement == "in_place" and case.collective not in IN_PLACE:
            return f"oneCCL's in-place {case.collective} is not measured."
        return None

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        x, out = buffers.x_place, buffers.out_place
        count = min(x.size, out.size) // (case.ranks if case.collective == "all_to_all" else 1)
        # 8-bit floats are only moved: supports() refuses their reductions
        dtype = "u8" if case.dtype.startswith("f8") else case.dtype
        arguments: list[Any] = [ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data)]
        arguments += [ctypes.c_size_t(count), DTYPES[dtype]]
        arguments += [OPS[case.op]] if case.op is not None else []
        arguments += [case.root] if case.root is not None else []
        return self._bound(CALLS[case.collective], *arguments, self._comm, None)

    def close(self) -> None:
        if self._comm:
            self._check("onecclCommDestroy", self._comm)
            self._comm = ctypes.c_void_p()

    def _bound(self, function: str, *arguments: Any) -> Callable[[], object]:
        """Returns the call. It raises RuntimeError if oneCCL reports an error."""
        call = getattr(_library(), function)
        call.errcheck = _raise
        return partial(call, *arguments)

    def _check(self, function: str, *arguments: Any) -> None:
        self._bound(function, *arguments)()


def _raise(result: int, function: Any, arguments: Any) -> int:
    if result:
        raise RuntimeError(f"{function.__name__} of oneCCL failed with {result}: see CCL_LOG_LEVEL=info.")
    return result


def _folder() -> Path | None:
    """Returns the folder with oneCCL's C API and plug-in for CPUs, or None."""
    root = os.environ.get("ONECCL_ROOT")
    folders = [Path(root) / "lib"] if root else []
    folders += [Path(sys.prefix) / "oneccl" / "lib", Path(sys.prefix) / "lib"]
    return next((one for one in folders if (one / LIBRARY).exists() and (one / PLUGIN).exists()), None)


def _transport() -> str:
    shared = os.environ["CCL_ATL_TRANSPORT"] == "ofi" and os.environ["CCL_ATL_SHM"] == "1"
    return "ofi, shared memory" if shared else os.environ["CCL_ATL_TRANSPORT"]


def _library() -> ctypes.CDLL:
    """Returns the library, which reads its environment when it is first called."""
    for key, value in {
        "CCL_PLUGIN": "ONECCL_LEGACY_CPU",
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_ATL_SHM": "1",
        "CCL_WORKER_OFFLOAD": "0",
        "CCL_LOG_LEVEL": "error",
    }.items():
        os.environ.setdefault(key, value)
    folder = _folder()
    assert folder is not None
    return ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)
