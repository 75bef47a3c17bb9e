"""What every call across nodes needs: arrays that are checked, ranks that agree, and failures that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..bootstrap.mpi import abandon
from ..errors import MismatchError, TimeoutError, UnisonoError, UsageError
from . import sums
from .engine import Setting, make
from .moves import Moves
from .mpi import MpiEngine
from .record import record
from .space import HostSpace
from .topology import NodeBootstrap, Topology

__all__ = ["Array", "Calls", "same", "spans"]

_MOST_LETTERS = 128  # of a call in words, as ranks compare them
_LOCAL_PATIENCE = 1.25  # a wait within the node outlasts one between nodes, whose error says more


class Array(NamedTuple):
    bytes: Any
    dtype: str
    item: int  # bytes of an element
    shape: tuple[int, ...]
    address: int
    stream: int | None  # on a GPU: its library's current one
    gpu: bool = False

    @property
    def elements(self) -> int:
        return len(self.bytes) // self.item


class _Gpu(NamedTuple):
    space: Any
    engine: Any
    moves: Moves


class _Body:
    """A call under way. Not a generator: of small calls that is a good part of their time."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._calls._end(error)


class Calls:
    """The communicator but for its collectives (communicator.py)."""

    def __init__(
        self,
        bootstrap: Any,
        topology: Topology,
        timeout_s: float,
        check: bool | None = None,
        device: int | None = None,
        max_sms: int = 0,
        peer_access: bool = True,
    ) -> None:
        self.topology, self.rank, self.size = topology, topology.rank, topology.size
        inner = NodeBootstrap(bootstrap, topology)
        self.local = _core.Communicator(
            inner, timeout_s * _LOCAL_PATIENCE + 0.5, check, device, max_sms, peer_access
        )
        checks = bootstrap.all_gather(bytes([self.local.check]))
        if len(set(checks)) > 1:  # one's words would be taken for another's data
            who = ", ".join(str(rank) for rank, its in enumerate(checks) if its == b"\1")
            raise UsageError(
                f"of all ranks only {who} check their calls: give check=, or UNISONO_CHECK, the same on "
                "every rank."
            )
        setting = Setting(bootstrap, topology, timeout_s, self.local.raise_if_failed)
        self._engine = make(setting)
        self._moves = Moves(topology, self.local, self._engine, HostSpace())
        self._replays: _core.Replays | None = None  # what the host's calls have been, until one fails
        if isinstance(self._engine, MpiEngine):
            self._replays = _core.Replays(self.local, self._engine.core, self.rank, self.size)
        self._gpu: Any = None  # the space, the engine and the moves on arrays of the GPU
        if device is not None:
            try:
                import torch
            except ImportError as error:
                raise UsageError(
                    f"GPUs of several nodes need PyTorch, which cannot be imported ({error}): install it on "
                    "every node."
                ) from error

            from .cuda import NcclEngine
            from .cuda_space import CudaSpace

            space = CudaSpace(torch.device("cuda", device))
            engine = NcclEngine(setting, space, device)
            self._gpu = _Gpu(space, engine, Moves(topology, self.local, engine, space))
        self._device = device
        self._failure: UnisonoError | None = None
        self.at_close: Callable[[], object] = lambda: None  # what else ends with it, unless it has failed

    @property
    def closed(self) -> bool:
        """Whether it has been closed, by close() or by an interrupt within a call."""
        return bool(self.local.closed)

    @property
    def device(self) -> int | None:
        """The CUDA ordinal of this rank's GPU, or None."""
        return self._device

    @property
    def check(self) -> bool:
        """See `unisono.Communicator.check`."""
        return bool(self.local.check)

    @check.setter
    def check(self, checked: bool) -> None:
        self.local.check = checked

    def close(self) -> None:
        """Leaves the communicator. Idempotent, and not collective."""
        self.local.close()
        self._engine.close()
        if self._gpu is not None:
            self._gpu.engine.close()
        if self._failure is None:
            self.at_close()

    def raise_if_failed(self) -> None:
        """See `unisono.Communicator.raise_if_failed`: also a death on this node."""
        self._raise_failure()
        self.local.raise_if_failed()

    def synchronize(self, stream: Any = None) -> None:
        """See `unisono.Communicator.synchronize`. stream None: torch's current one."""
        if self._gpu is None:
            raise UsageError("the communicator has no GPU: make it with device=, on every rank.")
        handle = self._gpu.space.handle(stream)
        with self._call("synchronize", together=False):
            self._gpu.engine.synchronize(self._gpu.space.stream(handle))
            self.local.synchronize(handle)

    @staticmethod
    def algorithms(collective: str, device: str = "cpu") -> list[str]:
        """The names that `algorithm` may have for a collective: of how nodes work together."""
        _core.Communicator.algorithms(collective, device)  # which refuses what is none
        return list(sums.ALGORITHMS.get(collective, ()))

    def _call(
        self,
        name: str,
        array: Array | None = None,
        *,
        op: str | None = None,
        root: int | None = None,
        algorithm: str | None = None,
        stream: Any = None,
        wire: str | None = None,
        together: bool = True,
        counted: bool = True,
    ) -> AbstractContextManager[None]:
        """A call's body, after the checks of its words; what goes wrong in it fails the communicator."""
        if self.closed:
            raise UsageError(f"the communicator is closed: make a new one to call {name}.")
        self._raise_failure()
        known = self.algorithms(name) if algorithm is not None else []
        on_gpu = array is not None and array.gpu
        if stream is not None and array is not None and not on_gpu:
            raise UsageError("stream= is for arrays on a GPU: leave it out.")
        asked = array.stream if stream is None and array is not None else stream
        handle = self._gpu.space.handle(asked) if on_gpu else None
        if algorithm is not None and algorithm not in known:
            choice = f"use one of {', '.join(known)}" if known else "leave it out"
            raise UsageError(f"{name} across nodes has no algorithm '{algorithm}': {choice}.")
        if algorithm == "chain" and not self.topology.uniform:
            raise UsageError(
                "chain needs as many ranks on every node, with consecutive numbers: use two_shot, or place "
                "the ranks node by node."
            )
        if self.check and together:
            with _Body(self):
                self._compare(_words(name, array if counted else None, op, root, algorithm, wire))
        return self._on_stream(handle) if on_gpu else _Body(self)

    @contextmanager
    def _on_stream(self, handle: Any) -> Iterator[None]:
        with _Body(self), self._gpu.space.on(handle):
            yield

    def _again(
        self,
        name: str,
        x: Any,
        out: Any = None,
        op: str = "sum",
        root: int = 0,
        algorithm: str | None = None,
        *more: Any,
        source: int = -1,
    ) -> Any:
        """The result of a call that has been made before. Else, and of calls that say `more`, NotImplemented:
        it is made in the usual way, in which `_play` may write it down."""
        if self._replays is None:
            return NotImplemented
        usual = any(word is not None for word in more)
        try:
            return self._replays.run(name, x, out, op, root, source, algorithm, usual)
        except BaseException as error:
            self._end(error)
            raise

    def _play(self, given: Array | None, taken: Array | None, steps: Callable[[Moves], object]) -> None:
        """What a call of those arrays does."""
        some = given or taken
        if some is not None and not len(some.bytes):
            return
        steps(self._moves if some is None else self._way(some))
        if self._replays is not None and self._replays.wanted:
            record(self._replays, self.topology, given and given.bytes, taken and taken.bytes, steps)

    def _end(self, error: BaseException) -> None:
        """What a call has raised."""
        if isinstance(error, UsageError):
            return
        self._replays = None
        if not isinstance(error, UnisonoError):
            return self.close()  # in the middle of a call: the peers cannot go on with this rank
        self._failure = error
        abandon()  # where MPI has started the ranks, its end would wait for those that are out of reach
        self.local.fail(str(error), isinstance(error, TimeoutError))
        self._engine.close()  # where that breaks connections, the peers hear of it now

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _compare(self, words: str) -> None:
        """Raises MismatchError, the same on every rank, where their calls differ."""
        said = self._tell(words.encode()[:_MOST_LETTERS].ljust(_MOST_LETTERS))
        for rank, other in enumerate(said):
            if other != said[0]:
                raise MismatchError(
                    f"rank 0 called {said[0].decode().rstrip()}, but rank {rank} called "
                    f"{other.decode('utf-8', 'replace').rstrip()}: make the same call on every rank."
                )

    def _tell(self, data: bytes) -> list[bytes]:
        """Everyone's `data`, of one length, in rank order."""
        told = np.empty(self.size * len(data), np.uint8)
        mine = np.frombuffer(bytearray(data), np.uint8)  # torch warns of memory that cannot be written
        self._moves.all_gather(mine, told).wait()
        whole = told.tobytes()
        return [whole[at : at + len(data)] for at in range(0, len(whole), len(data))]

    def _compare_counts(self, sends: Sequence[int], receives: Sequence[int]) -> None:
        rows = [np.frombuffer(row, np.int64) for row in self._tell(np.array(sends, np.int64).tobytes())]
        for rank, row in enumerate(rows):
            if row[self.rank] != receives[rank]:
                raise MismatchError(
                    f"rank {rank} sends {row[self.rank]} elements to rank {self.rank}, which expects "
                    f"{receives[rank]}: give both ends of a pair the same count."
                )

    def _array(self, x: Any, what: str, written: bool = False) -> Array:
        array = Array(*_core.describe(x, what, written))
        if array.bytes is not None:
            return array
        if self._gpu is None:
            raise UsageError(f"{what} is on a GPU: make the communicator with device=, on every rank.")
        from .cuda_space import flat

        return array._replace(bytes=flat(x), gpu=True)

    def _way(self, array: Array) -> Moves:
        """How data moves from where the array lies."""
        return self._gpu.moves if array.gpu else self._moves

    def _new_output(
        self, out: Any, like: Any, given: Array, shape: tuple[int, ...], stream: Any
    ) -> tuple[Any, Array]:
        if out is None:
            out = _core.empty_like(like, shape, self._device or 0, stream if given.gpu else None)
        return out, self._output(out, given, shape)

    def _output(self, out: Any, given: Array, shape: tuple[int, ...]) -> Array:
        taken = self._array(out, "out", written=True)
        if taken.dtype != given.dtype:
            raise UsageError(f"out has dtype {taken.dtype}, but x has {given.dtype}: give both the same.")
        if taken.shape != shape:
            raise UsageError(f"out has shape {taken.shape}: this call gives {shape}.")
        if taken.gpu != given.gpu:
            raise UsageError("x and out are not both on the CPU or both on the GPU: move one of them.")
        return taken

    def _check_call(
        self,
        name: str,
        given: Array,
        taken: Array | None,
        count: int,
        root: int = 0,
        op: str = "sum",
        wire: str | None = None,
    ) -> None:
        """Raises UsageError for a call that is wrong by itself. count: elements as in unisono::Call."""
        out = taken.address if taken else 0
        _core.check_call(name, self.rank, self.size, given.address, out, count, given.dtype, root, op, wire)

    def _without_ranks(self, array: Array) -> tuple[int, ...]:
        if not array.shape or array.shape[0] != self.size:
            raise UsageError(f"x has shape {array.shape}: its first axis is the ranks, {self.size}.")
        return array.shape[1:]


def spans(counts: Sequence[int], item: int) -> list[tuple[int, int]]:
    """Where each of some parts that follow each other begins, and how long it is, in bytes."""
    lengths = [count * item for count in counts]
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def same(given: Array, taken: Array) -> Any:
    """The input's bytes: the output's own where the call is in place."""
    return taken.bytes if given.address == taken.address else given.bytes


def _words(
    name: str, array: Array | None, op: str | None, root: int | None, algorithm: str | None, wire: str | None
) -> str:
    """A call as its ranks compare it: "all_reduce(sum) of 1024 f32"."""
    words = name + (f"({op})" if op else "")
    if array is not None:
        words += f" of {array.elements} {array.dtype}" + (f" as {wire}" if wire else "")
    words += f" with root {root}" if root is not None else ""
    words += " on the GPU" if array is not None and array.gpu else ""
    return words + (f" by {algorithm}" if algorithm else "")
