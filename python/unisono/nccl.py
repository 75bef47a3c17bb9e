"""NCCL's C API through ctypes, for the backends of the bench. Constants are those of nccl.h (2.28)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

UNIQUE_ID_BYTES = 128
WIN_COLL_SYMMETRIC = 1
SUCCESS, IN_PROGRESS = 0, 7
DTYPES = {
    "i8": 0,
    "u8": 1,
    "i32": 2,
    "i64": 4,
    "f16": 6,
    "f32": 7,
    "f64": 8,
    "bf16": 9,
    "f8e4m3": 10,
    "f8e5m2": 11,
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which NCCL takes by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OUT = ctypes.POINTER(ctypes.c_void_p)
REQUIRED: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_I)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [_OUT, _I, UniqueId, _I],
    "ncclCommDestroy": [_P],
    "ncclCommAbort": [_P],
    "ncclCommGetAsyncError": [_P, ctypes.POINTER(_I)],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllReduce": [_P, _P, _N, _I, _I, _P, _P],
    "ncclReduce": [_P, _P, _N, _I, _I, _I, _P, _P],
    "ncclBroadcast": [_P, _P, _N, _I, _I, _P, _P],
    "ncclAllGather": [_P, _P, _N, _I, _P, _P],
    "ncclReduceScatter": [_P, _P, _N, _I, _I, _P, _P],
    "ncclSend": [_P, _N, _I, _I, _P, _P],
    "ncclRecv": [_P, _N, _I, _I, _P, _P],
}
# Windows came with 2.27; all_to_all, gather and scatter with 2.28. Older versions build these of sends.
NEWER: dict[str, list[Any]] = {
    "ncclMemAlloc": [_OUT, _N],
    "ncclMemFree": [_P],
    "ncclCommWindowRegister": [_P, _P, _N, _OUT, _I],
    "ncclCommWindowDeregister": [_P, _P],
    "ncclAlltoAll": [_P, _P, _N, _I, _P, _P],
    "ncclGather": [_P, _P, _N, _I, _I, _P, _P],
    "ncclScatter": [_P, _P, _N, _I, _I, _P, _P],
}


class NcclError(RuntimeError):
    """A call of NCCL failed. The message names the function and gives NCCL's reason."""


def version_text(code: int) -> str:
    """Returns the version in words: 22809 -> "2.28.9", as NCCL_VERSION codes versions from 2.9 on."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def candidates() -> list[str]:
    """Returns where the library may be: as torch or the system has it, then in the pip package."""
    found = ["libnccl.so.2"]
    try:
        spec = find_spec("nvidia.nccl")
    except (ImportError, ValueError):
        spec = None
    for folder in spec.submodule_search_locations or () if spec else ():
        found += [str(path) for path in sorted(Path(folder, "lib").glob("libnccl.so.2*"))]
    return found


class Library:
    """The functions of libnccl.so.2. Raises NcclError without such a library, or without `REQUIRED`."""

    def __init__(self) -> None:
        self._library = _load()
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclGetLastError.restype = ctypes.c_char_p
        self._library.ncclGetLastError.argtypes = [_P]
        self._functions = {name: self._function(name, types) for name, types in REQUIRED.items()}
        newer = {name: types for name, types in NEWER.items() if hasattr(self._library, name)}
        self._functions |= {name: self._function(name, types) for name, types in newer.items()}

    def _function(self, name: str, types: list[Any]) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NcclError(f"this NCCL has no {name}: install NCCL 2.19 or newer.") from None
        function.argtypes, function.restype = types, _I
        function.errcheck = partial(self._check, name)
        return function

    def _check(self, name: str, code: int, function: object, arguments: tuple[object, ...]) -> int:
        if code != SUCCESS:
            reason = self._library.ncclGetErrorString(code).decode()
            last = (self._library.ncclGetLastError(None) or b"").decode().strip()
            raise NcclError(f"{name} failed: {reason}{f' ({last})' if last else ''}.")
        return code

    def has(self, name: str) -> bool:
        """Returns whether this library has the function, one of `REQUIRED` or `NEWER`."""
        return name in self._functions

    def function(self, name: str) -> Callable[..., int]:
        """Returns the function. A call raises NcclError if its result is not ncclSuccess."""
        return self._functions[name]  # type: ignore[no-any-return]

    def __call__(self, name: str, *arguments: Any) -> None:
        self._functions[name](*arguments)

    def version(self) -> str:
        code = _I()
        self("ncclGetVersion", ctypes.byref(code))
        return version_text(code.value)

    def allocate(self, size: int) -> int:
        """Returns the address of `size` bytes on the current GPU, in memory that NCCL can export."""
        memory = _P()
        self("ncclMemAlloc", ctypes.byref(memory), size)
        return int(memory.value or 0)

    def free(self, address: int) -> None:
        """Frees memory of `allocate`. Requires: it is not registered any more."""
        self("ncclMemFree", address)

    def unique_id(self) -> bytes:
        """Returns a fresh id, for all ranks of one communicator."""
        made = UniqueId()
        self("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


def _load() -> ctypes.CDLL:
    errors = []
    for name in candidates():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            errors.append(str(error))
    raise NcclError(
        f"no NCCL library can be loaded ({errors[-1]}): pip install nvidia-nccl-cu13, or a torch for CUDA."
    )


class Communicator:
    """A rank's NCCL communicator on the current GPU. Bound calls queue on `stream`."""

    def __init__(self, library: Library, rank: int, size: int, unique_id: bytes, stream: int) -> None:
        self.library, self.rank, self.size = library, rank, size
        self._stream, self._handle = _P(stream), _P()
        self._windows: list[ctypes.c_void_p] = []
        library(
            "ncclCommInitRank", ctypes.byref(self._handle), size, UniqueId.from_buffer_copy(unique_id), rank
        )

    def bound(self, name: str, *arguments: Any, stream: int | None = None) -> Callable[[], object]:
        """Returns the call with all arguments bound. NCCL's last two are always the communicator and the
        stream (None: the communicator's)."""
        function, converters = self.library.function(name), (REQUIRED | NEWER)[name]
        ready = [convert(value) for convert, value in zip(converters, arguments, strict=False)]
        return partial(function, *ready, self._handle, self._stream if stream is None else _P(stream))

    def grouped(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """Returns a call that makes `calls` as one NCCL group."""
        begin, end = self.library.function("ncclGroupStart"), self.library.function("ncclGroupEnd")

        def group() -> None:
            begin()
            try:
                for call in calls:
                    call()
            finally:  # an open group would hold back all later calls of this thread
                end()

        return group

    def raise_if_failed(self) -> None:
        """Raises NcclError if an operation failed asynchronously."""
        code = _I()
        self.library("ncclCommGetAsyncError", self._handle, ctypes.byref(code))
        if code.value not in (SUCCESS, IN_PROGRESS):
            raise NcclError(f"NCCL failed on the GPU: error {code.value}; NCCL_DEBUG=WARN tells more.")

    def register(self, address: int, size: int) -> None:
        """Registers memory of `Library.allocate` as a symmetric window, until `close`. Collective. Raises
        NcclError."""
        window = _P()
        self.library(
            "ncclCommWindowRegister", self._handle, address, size, ctypes.byref(window), WIN_COLL_SYMMETRIC
        )
        if not window:
            raise NcclError(
                "NCCL registered no symmetric window, though it reported success: it needs peer access "
                "between all GPUs, and NCCL_WIN_ENABLE must not be 0."
            )
        self._windows.append(window)

    def abort(self) -> None:
        """Ends the kernels under way and frees the communicator. Windows and their memory stay."""
        handle, self._handle = self._handle, _P()
        if handle:
            self.library("ncclCommAbort", handle)

    def close(self) -> None:
        """Frees windows and communicator. Collective. Idempotent. Requires: no graph is left that captured a
        call, since NCCL would wait for the graph."""
        if not self._handle:
            return
        for window in self._windows:
            self.library("ncclCommWindowDeregister", self._handle, window)
        self._windows.clear()
        self.library("ncclCommDestroy", self._handle)
        self._handle = _P()
