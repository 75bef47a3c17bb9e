"""The protocol of a backend, a library under test, and the look-up of backends by name.

A backend of your own subclasses `Backend`, names itself, and turns a case and its buffers into a callable:

    class Mine(Backend):
        name = "mine"
        def setup(self, ranks): self.comm = mylib.init(ranks.rank, ranks.size, ranks.all_gather)
        def supports(self, case):
            return None if case.collective == "all_reduce" else "mine has all_reduce only"
        def prepare(self, case, buffers):
            return partial(self.comm.all_reduce, buffers.x, buffers.out, case.op)

The package's pyproject.toml declares the backend:

    [project.entry-points."unisono.bench_backends"]
    mine = "mypackage.bench:Mine"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

from unisono.bench.cases import CaseError
from unisono.records import Case

GROUP = "unisono.bench_backends"
OTHER = "unisono@"  # before the prefix of another installation
BUILT_IN = {  # backends for GPUs last
    "unisono": "unisono.bench.backends.unisono:UnisonoBackend",
    "mpi": "unisono.bench.backends.mpi:MpiBackend",
    "gloo": "unisono.bench.backends.gloo:GlooBackend",
    "torch-unisono": "unisono.bench.backends.torch_distributed:TorchUnisonoBackend",
    "torch-gloo": "unisono.bench.backends.torch_distributed:TorchGlooBackend",
    "fabric": "unisono.bench.backends.fabric:FabricBackend",
    "vllm-shm": "unisono.bench.backends.vllm_shm:VllmShmBackend",
    "deepspeed-shm": "unisono.bench.backends.deepspeed_shm:DeepSpeedShmBackend",
    "oneccl": "unisono.bench.backends.oneccl:OneCclBackend",
    "mpich": "unisono.bench.backends.mpi:MpichBackend",
    "impi": "unisono.bench.backends.mpi:IntelMpiBackend",
    "openmpi": "unisono.bench.backends.mpi:OpenMpiBackend",
    "nccl": "unisono.bench.backends.nccl:NcclBackend",
    "nccl-windows": "unisono.bench.backends.nccl:NcclWindowsBackend",
    "torch-symm": "unisono.bench.backends.torch_symm:TorchSymmBackend",
    "torch-async-tp": "unisono.bench.backends.torch_async_tp:TorchAsyncTpBackend",
    "flashinfer": "unisono.bench.backends.flashinfer:FlashInferBackend",
    "async-ep": "unisono.bench.backends.async_ep:AsyncEpBackend",
    "torch": "unisono.bench.backends.one_gpu:TorchBackend",
    "moe-ops": "unisono.bench.backends.one_gpu:MoeOpsBackend",
    "te": "unisono.bench.backends.one_gpu:TransformerEngineBackend",
}


@dataclass(frozen=True)
class Ranks:
    """This rank among the ranks of a run, as a backend sees it. Also a bootstrap for `unisono.init`.

    Attributes:
        rank, size: number of this rank, and how many there are.
        all_gather: exchanges bytes between all ranks, for a backend's own bootstrap. In `setup` and
            `allocate` it raises if another rank has failed there.
        communicator: the bench's unisono communicator, which also owns the symmetric buffers.
        device, stream: on GPUs, this rank's GPU, and the CUDA stream (as an integer) on which a backend must
            queue every call. Both are current in torch.
    """

    rank: int
    size: int
    all_gather: Callable[[bytes], list[bytes]]
    communicator: Any
    device: int | None = None
    stream: int = 0

    def close(self) -> None:
        """Does nothing: the bench's bootstrap outlives the backends."""


@dataclass(frozen=True)
class Buffers:
    """One rank's buffers for a case, the same memory for every backend.

    Contiguous numpy arrays, on GPUs torch tensors, with the shapes of `cases.layout`. None: this rank has no
    such buffer. In place follows MPI: all_reduce, broadcast, reduce and all_to_all have `out is x`.
    all_gather and gather have `x` in `out[rank]`, reduce_scatter and scatter `out` in `x[rank]` (gather and
    scatter at the root only).

    Attributes:
        spare: scratch of the shape of `x` if a reduce has no `out`, for a library that would overwrite its
            input there.
        x_place, out_place: `x` and `out`. A rank without one has the root's place in its own memory instead,
            for a library that asks every rank of a rooted call for both.
    """

    x: Any
    out: Any
    spare: Any = None
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    x_place: Any = None
    out_place: Any = None


class MoeCalls(Protocol):
    """The calls of one case of a mixture of experts, bound to its buffers, with routes of routes.of(case).
    Subclass it explicitly to inherit the default."""

    def route(self) -> object:
        """Makes the routes known to all ranks, for a combine without a dispatch that counts."""

    def dispatch(self) -> object: ...

    def combine(self) -> object:
        """Sums into the output: buffers.x of moe_combine, else the rows that the last dispatch has given."""

    def received(self) -> Any:
        """Returns the rows that the last dispatch has given, as an array of the device."""

    def summed(self) -> Any:
        """Returns the sums of the last combine, as an array of the device; None: they lie in the output."""
        return None


@dataclass(frozen=True)
class ResultCall:
    """A call, and what brings the result of its last call: rows or sums, as an array; None: they lie in the
    output."""

    call: Callable[[], object]
    result: Callable[[], Any]

    def __call__(self) -> object:
        return self.call()


def moe_call(case: Case, calls: MoeCalls) -> ResultCall:
    """Returns the call of a case."""
    dispatch, combine = calls.dispatch, calls.combine
    if case.collective == "moe_dispatch":
        return ResultCall(dispatch, calls.received)
    if case.collective == "moe_combine":
        calls.route()
        return ResultCall(combine, calls.summed)

    def both() -> None:
        dispatch()
        combine()

    return ResultCall(both, calls.summed)


class Backend(Protocol):
    """A library under test. Subclass it explicitly to inherit the defaults. The bench calls every method on
    all ranks in step."""

    name: str
    # True: sums of floats are combined in rank order, and must match the reference bit by bit
    bit_exact: bool = False
    wire: str | None = None  # the name in vocabulary.WIRES by which it quantises; sets the bound of checks
    wire_bits: float | None = None  # bits of an element between ranks if it quantises
    devices: tuple[str, ...] = ("cpu",)  # where the buffers may lie
    threads: bool = False  # True: ranks may be threads of one process
    own_memory: bool = False  # True: symmetric cases lie in memory of `allocate`
    memory: str | None = None  # the place of that memory: host, pinned or device; None: the run's
    variants: tuple[str, ...] = ()  # the variants, `name:variant` each, that the name alone stands for

    moe: bool = False  # True: offers the cases of a mixture of experts
    norm: bool = False  # True: offers all_reduce_rms_norm
    matmul: bool = False  # True: offers matmuls with their collective
    collectives: bool = True  # False: offers nothing else
    point_to_point: bool = False  # True: offers ping-pongs, and all_to_all built of sends and receives
    asked_for: bool = False  # True: measured only if named

    own_threads: bool = False  # True: the library works in threads of its own, which need a core too

    def available(self, ranks: int) -> str | None:
        """Returns None if the library can serve this run of `ranks` processes, else why not."""
        return None

    def version(self) -> str:
        """Returns the library's version, for the report. Called only if `available` returned None."""
        return ""

    def setup(self, ranks: Ranks) -> None:
        """Creates the communicator. May communicate. Raises if it cannot. The bench then calls `abort` and
        `close` on every rank, and skips the backend."""

    def expect(self, cases: Sequence[Case]) -> None:
        """Notes all cases that `prepare` may be called with. Called once, after `setup`."""

    def supports(self, case: Case) -> str | None:
        """Returns None if this library offers the case, else why not; the same on every rank."""
        return None

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Returns a callable that performs the collective once, to completion on this rank.

        On GPUs the callable may only queue the collective, see `queues`. All arguments are bound beforehand,
        so that a timed call runs as little Python as the library allows. For a mixture of experts, which has
        its routes from routes.of(case), the callable is that of `moe_call`."""
        ...

    def checked(self) -> AbstractContextManager[None]:
        """Returns a context for the first call of a cell, which is not timed. A library that can compare the
        ranks' calls before data moves does so there."""
        return nullcontext()

    def queues(self) -> bool:
        """Returns whether, on GPUs, a call returns once it is queued on the stream. A call that waits for the
        GPU can neither be captured in a graph nor timed by events. Only the host clock times such calls."""
        return True

    def allocate(self, size: int) -> tuple[Any, Any]:
        """Returns input and output memory of `size` bytes each. Called once, if `own_memory` is set.

        Arrays of bytes, or `buffers.Region` if the memory lies elsewhere than the run's. Raises if it cannot;
        the bench then leaves the backend out."""
        raise NotImplementedError

    def raise_if_failed(self) -> None:
        """Raises if a queued call has failed on the GPU. Called when the stream is empty."""

    def algorithm(self, case: Case) -> str | None:
        """Returns the algorithm that the library will use, or None if unknown."""
        return None

    def abort(self) -> None:
        """Ends the work under way as far as possible, without the other ranks. Called after a hang of a GPU,
        and after a setup that failed on any rank. Only `close` follows."""

    def staged(self) -> bool:
        """Returns whether, on GPUs, the data goes through the host's memory."""
        return False

    def sms(self, case: Case) -> int | None:
        """Returns how many SMs of a GPU the call takes, 0 for copy engines, None if unknown."""
        return None

    def close(self) -> None:
        """Frees the resources of `setup`."""


def names() -> list[str]:
    """Returns the names of all known backends, built-in ones first."""
    return list(dict.fromkeys([*BUILT_IN, *(point.name for point in entry_points(group=GROUP))]))


def load(name: str) -> Backend:
    """Returns a new backend; `name:variant` gives the class a variant (unisono takes an algorithm).
    `unisono@PREFIX` is another installation.

    Raises CaseError for an unknown name, and for a variant of a backend that has none."""
    if name.startswith(OTHER):
        return _class_at("unisono.bench.backends.unisono_other:OtherUnisonoBackend")(name.removeprefix(OTHER))
    base, _, variant = name.partition(":")
    made: Callable[..., Backend]
    points = [point for point in entry_points(group=GROUP) if point.name == base]
    if base in BUILT_IN:
        made = _class_at(BUILT_IN[base])
    elif points:
        try:
            made = points[0].load()
        except Exception as error:  # code of another package
            raise CaseError(
                f"backend {base!r} cannot be loaded ({type(error).__name__}: {error}): mend or remove the "
                "package that brings it."
            ) from error
    else:
        raise CaseError(f"unknown backend {base!r}: choose from {', '.join(names())}.")
    if not variant:
        return made()
    try:
        return made(variant)
    except TypeError:
        raise CaseError(
            f"backend {base!r} has no variants, so {name!r} cannot be run: name it {base!r}."
        ) from None


def _class_at(place: str) -> Callable[..., Backend]:
    module, _, attribute = place.partition(":")
    found: Callable[..., Backend] = getattr(import_module(module), attribute)
    return found


def expanded(wanted: Sequence[str]) -> list[str]:
    """Returns the names, with the variants in place of each name that stands for several."""
    found = []
    for name in wanted:
        variants = () if ":" in name else load(name).variants
        found += [f"{name}:{variant}" for variant in variants] or [name]
    return list(dict.fromkeys(found))


def names_for(
    device: str, collectives: bool = True, moe: bool = False, norm: bool = False, matmul: bool = False
) -> list[str]:
    """Returns all known backends for that device that offer collectives, mixture of experts, fused norms or
    matmuls, whichever is set, except those that must be named (`asked_for`). Leaves out backends that cannot
    be loaded, which `unisono info` lists."""
    found = []
    for name in names():
        try:
            backend = load(name)
        except CaseError:
            continue
        useful = (collectives and backend.collectives) or (moe and backend.moe) or (norm and backend.norm)
        useful = useful or (matmul and backend.matmul)
        if useful and device in backend.devices and not backend.asked_for:
            found.append(name)
    return found


def check_names(wanted: Sequence[str]) -> None:
    """Raises CaseError for an unknown name, for a variant that the class refuses, and for other installations
    that are missing or of one name."""
    others = [load(name).name for name in wanted if name.startswith(OTHER)]
    if len(set(others)) < len(others):
        raise CaseError(f"{', '.join(others)}: these installations have one name, so rename a folder.")
    for name in (name for name in wanted if not name.startswith(OTHER)):
        if name.partition(":")[0] not in names():
            raise CaseError(f"unknown backend {name!r}: choose from {', '.join(names())}.")
        if ":" in name:
            load(name)
