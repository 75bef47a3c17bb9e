"""Functions of the CUDA runtime and driver that torch does not offer: graphs without torch's allocator and
random generators, and waits of a stream for a word of host memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

SUCCESS = 0
MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses decide the direction
PEER_ACCESS_ALREADY_ENABLED = 704
CAPTURE_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal
HOST_REGISTER_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
WAIT_VALUE_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic, (int32_t)(*address - value) >= 0

_PCI_ADDRESS_BYTES = 32
_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(_POINTER)
_RUNTIME: dict[str, list[Any]] = {
    "cudaStreamBeginCapture": [_POINTER, ctypes.c_int],
    "cudaStreamEndCapture": [_POINTER, _OUT],
    "cudaGraphInstantiate": [_OUT, _POINTER, ctypes.c_ulonglong],  # of CUDA 12 and later
    "cudaGraphUpload": [_POINTER, _POINTER],
    "cudaGraphLaunch": [_POINTER, _POINTER],
    "cudaGraphDestroy": [_POINTER],
    "cudaGraphExecDestroy": [_POINTER],
    "cudaGetLastError": [],
    "cudaMemcpyAsync": [_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, _POINTER],
    "cudaDeviceEnablePeerAccess": [ctypes.c_int, ctypes.c_uint],
    "cudaHostRegister": [_POINTER, ctypes.c_size_t, ctypes.c_uint],
    "cudaHostUnregister": [_POINTER],
    "cudaHostGetDevicePointer": [_OUT, _POINTER, ctypes.c_uint],
}


class CudaError(RuntimeError):
    """A call of the CUDA runtime or driver failed. The message names the call and the reason."""


class Runtime:
    """libcudart as torch has loaded it; `version` is torch.version.cuda."""

    def __init__(self, version: str | None) -> None:
        major = str(version).partition(".")[0]
        try:
            self._library = ctypes.CDLL(f"libcudart.so.{major}")
        except OSError as error:
            raise CudaError(
                f"libcudart.so.{major}, which torch was built with, cannot be loaded ({error}): install "
                "torch with its own CUDA packages, or add the library's folder to LD_LIBRARY_PATH."
            ) from None
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        for name, arguments in _RUNTIME.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function of `_RUNTIME`. Raises CudaError, except if peer access was enabled already."""
        code = getattr(self._library, name)(*arguments)
        if code == PEER_ACCESS_ALREADY_ENABLED:
            self._library.cudaGetLastError()
        elif code != SUCCESS:
            text = self._library.cudaGetErrorString(code).decode()
            self._library.cudaGetLastError()  # clears the error, so that no later call reports it again
            raise CudaError(f"{name} failed: {text}.")

    def device_pointer(self, host: int) -> int:
        """Returns the address of registered host memory on the current GPU."""
        found = _POINTER()
        self("cudaHostGetDevicePointer", ctypes.byref(found), host, 0)
        return int(found.value or 0)


class Driver:
    """libcuda: stream memory operations and PCI addresses. Raises OSError if there is no libcuda."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcuda.so.1")
        self._wait = library.cuStreamWaitValue32_v2
        self._wait.argtypes = [_POINTER, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._wait.restype = ctypes.c_int

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Queues a wait until the word at `address` is at least `value`, cyclically. Raises CudaError."""
        code = self._wait(stream, address, value & 0xFFFFFFFF, WAIT_VALUE_GEQ)
        if code != SUCCESS:
            raise CudaError(f"cuStreamWaitValue32 failed with code {code}.")

    def pci_address(self, index: int) -> str:
        """Returns the PCI address of GPU `index`, as in /sys/bus/pci/devices. Raises CudaError."""
        device, address = ctypes.c_int(), ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
        code = (
            self._library.cuInit(0)
            or self._library.cuDeviceGet(ctypes.byref(device), index)
            or self._library.cuDeviceGetPCIBusId(address, len(address), device)
        )
        if code != SUCCESS:
            raise CudaError(f"the driver gave no PCI address of GPU {index}: error {code}.")
        return address.value.decode().lower()


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", _POINTER),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        *((name, _POINTER) for name in ("parameters", "extra", "kernel", "context")),
    )


def most_blocks(graph: ctypes.c_void_p) -> int | None:
    """Returns the thread blocks of a graph's largest kernel, 0 without kernels; None if the driver does not
    say."""
    library = ctypes.CDLL("libcuda.so.1")
    count, kind, node = ctypes.c_size_t(), ctypes.c_int(), _KernelNode()
    failed = library.cuGraphGetNodes(graph, None, ctypes.byref(count))
    nodes = (_POINTER * count.value)()
    failed = failed or library.cuGraphGetNodes(graph, nodes, ctypes.byref(count))
    most = 0
    for handle in map(_POINTER, nodes):
        failed = failed or library.cuGraphNodeGetType(handle, ctypes.byref(kind))
        if not failed and kind.value == KERNEL_NODE:
            failed = library.cuGraphKernelNodeGetParams_v2(handle, ctypes.byref(node))
            most = max(most, math.prod(node.grid))
    return None if failed else most


class Graph:
    """A graph of `count` calls of `call`, captured on `stream` and ready to run. `blocks`: of its largest
    kernel."""

    def __init__(self, runtime: Runtime, stream: int, call: Callable[[], object], count: int) -> None:
        self._runtime, self._stream, self._exec = runtime, _POINTER(stream), _POINTER()
        graph = _POINTER()
        runtime("cudaStreamBeginCapture", self._stream, CAPTURE_THREAD_LOCAL)
        try:
            for _ in range(count):
                call()
        except BaseException:
            self._abandon(graph)
            raise
        runtime("cudaStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            self.blocks = most_blocks(graph)
            runtime("cudaGraphInstantiate", ctypes.byref(self._exec), graph, 0)
        finally:
            runtime("cudaGraphDestroy", graph)
        runtime("cudaGraphUpload", self._exec, self._stream)

    def _abandon(self, graph: ctypes.c_void_p) -> None:
        """Ends a capture that the call has broken, without an error besides the call's own."""
        try:
            self._runtime("cudaStreamEndCapture", self._stream, ctypes.byref(graph))
            if graph:
                self._runtime("cudaGraphDestroy", graph)
        except CudaError:
            pass

    def launch(self) -> None:
        """Queues one run on the stream."""
        self._runtime("cudaGraphLaunch", self._exec, self._stream)

    def close(self) -> None:
        if self._exec:
            self._runtime("cudaGraphExecDestroy", self._exec)
            self._exec = _POINTER()
