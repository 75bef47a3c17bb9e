"""The communicator of ranks on several nodes: the methods of `unisono.Communicator`, checked here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..bootstrap_mpi import abandon
from ..errors import MismatchError, TimeoutError, UnisonoError, UsageError
from . import sums
from .engine import Setting, make
from .moves import Moves
from .space import HostSpace
from .topology import NodeBootstrap, Topology

__all__ = ["HierarchicalCommunicator"]

OPS = ("sum", "prod", "min", "max", "avg")
_ITEM = {
    "f32": 4,
    "f64": 8,
    "f16": 2,
    "bf16": 2,
    "i8": 1,
    "u8": 1,
    "i32": 4,
    "i64": 8,
    "f8e4m3": 1,
    "f8e5m2": 1,
}
_MOST_LETTERS = 128  # of a call in words, as ranks compare them
_LOCAL_PATIENCE = 1.25  # a wait within the node outlasts one between nodes, whose error says more


class _Array(NamedTuple):
    bytes: Any
    dtype: str
    shape: tuple[int, ...]
    address: int

    @property
    def item(self) -> int:
        return _ITEM[self.dtype]


class HierarchicalCommunicator:
    """The ranks of several nodes. Made by unisono.init() where it finds that.

    Methods, arguments, results and errors are those of `unisono.Communicator` (see there), and so are the
    bits of sums. Within a node data goes the way of `local`, the communicator of its ranks; between nodes
    over an engine: MPI where it has started the ranks, else gloo. After an error of communication it is
    failed: every call raises that error.

    Attributes:
        rank, size: this rank's number, from 0, and how many there are on all nodes.
        topology: which ranks share a node.
        local: the communicator of this node's ranks.
    """

    def __init__(
        self,
        bootstrap: Any,
        topology: Topology,
        timeout_s: float,
        check: bool | None = None,
        device: int | None = None,
        max_sms: int = 0,
    ) -> None:
        self.topology, self.rank, self.size = topology, topology.rank, topology.size
        self._check = _asked_for() if check is None else check
        inner = NodeBootstrap(bootstrap, topology)
        self.local = _core.Communicator(
            inner, timeout_s * _LOCAL_PATIENCE + 0.5, self._check, device, max_sms
        )
        self._engine = make(Setting(bootstrap, topology, timeout_s, self.local.raise_if_failed))
        self._moves = Moves(topology, self.local, self._engine, HostSpace())
        self._device = device
        self._failure: UnisonoError | None = None
        self._calls = 0

    def __enter__(self) -> HierarchicalCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        node, nodes = self.topology.node, len(self.topology.nodes)
        return f"<HierarchicalCommunicator: rank {self.rank} of {self.size}, node {node} of {nodes}>"

    @property
    def closed(self) -> bool:
        """Whether it has been closed, by close() or by an interrupt within a call."""
        return bool(self.local.closed)

    @property
    def device(self) -> int | None:
        """The CUDA ordinal of this rank's GPU, or None."""
        return self._device

    def close(self) -> None:
        """Leaves the communicator. Idempotent, and not collective."""
        self.local.close()
        self._engine.close()

    # ---- what moves ----------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        with self._call("barrier"):
            self._moves.barrier()

    def broadcast(
        self, x: Any, root: int = 0, out: Any = None, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.broadcast`."""
        self._check_root(root)
        given = self._array(x, "x", written=out is None and self.rank != root)
        taken = given if out is None else self._output(out, x, given, given.shape)
        with self._call("broadcast", given, root=root, algorithm=algorithm):
            if self.rank == root:
                self._moves.space.copy(taken.bytes, given.bytes)
            if len(taken.bytes):
                self._moves.broadcast(taken.bytes, root)
        return x if out is None else out

    def all_gather(self, x: Any, out: Any = None, algorithm: str | None = None, stream: Any = None) -> Any:
        """See `unisono.Communicator.all_gather`."""
        given = self._array(x, "x")
        out, taken = self._new_output(out, x, given, (self.size, *given.shape))
        self._check_overlap("all_gather", given, taken, self.rank * len(given.bytes), 0)
        with self._call("all_gather", given, algorithm=algorithm):
            if len(given.bytes):
                self._moves.all_gather(given.bytes, taken.bytes)
        return out

    def gather(
        self, x: Any, root: int = 0, out: Any = None, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.gather`."""
        self._check_root(root)
        given, taken = self._array(x, "x"), None
        if self.rank == root:
            out, taken = self._new_output(out, x, given, (self.size, *given.shape))
            self._check_overlap("gather", given, taken, self.rank * len(given.bytes), 0)
        with self._call("gather", given, root=root, algorithm=algorithm):
            if len(given.bytes):
                self._moves.gather(given.bytes, taken and taken.bytes, root)
        return out if self.rank == root else None

    def scatter(
        self, x: Any, root: int = 0, out: Any = None, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.scatter`."""
        self._check_root(root)
        if x is None:
            if self.rank == root:
                raise UsageError(f"scatter needs x at the root, rank {root}.")
            if out is None:
                raise UsageError("scatter without x needs out, which says the shape and dtype.")
            given, taken = None, self._array(out, "out", written=True)
        else:
            given = self._array(x, "x")
            out, taken = self._new_output(out, x, given, self._without_ranks(given))
            if self.rank == root:
                self._check_overlap("scatter", given, taken, 0, self.rank * len(taken.bytes))
        with self._call("scatter", taken, root=root, algorithm=algorithm):
            if len(taken.bytes):
                self._moves.scatter(given.bytes if given and self.rank == root else None, taken.bytes, root)
        return out

    def all_to_all(self, x: Any, out: Any = None, algorithm: str | None = None, stream: Any = None) -> Any:
        """See `unisono.Communicator.all_to_all`."""
        given = self._array(x, "x")
        self._without_ranks(given)
        out, taken = self._new_output(out, x, given, given.shape)
        self._check_overlap("all_to_all", given, taken)
        with self._call("all_to_all", given, algorithm=algorithm):
            if len(given.bytes):
                self._moves.all_to_all(_same(given, taken), taken.bytes)
        return out

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Any = None,
        algorithm: str | None = None,
        stream: Any = None,
    ) -> Any:
        """See `unisono.Communicator.all_to_all_v`."""
        given = self._array(x, "x")
        sends = self._parts(send_counts, "send", given)
        receives = self._parts(recv_counts, "receive", given)
        if given.shape != (sum(send_counts),):
            raise UsageError(
                f"x has shape {given.shape}, but the send counts add up to {sum(send_counts)}: pass a 1-D x "
                "of that many."
            )
        out, taken = self._new_output(out, x, given, (sum(recv_counts),))
        if send_counts[self.rank] != recv_counts[self.rank]:
            raise UsageError(
                f"all_to_all_v: rank {self.rank} sends itself {send_counts[self.rank]} elements, but "
                f"receives {recv_counts[self.rank]} from itself: give both the same count."
            )
        self._check_overlap("all_to_all_v", given, taken)
        if given.address == taken.address and len(given.bytes) and list(send_counts) != list(recv_counts):
            raise UsageError(
                "all_to_all_v in place needs the same send and receive counts: give it another output."
            )
        with self._call("all_to_all_v", given, algorithm=algorithm, counted=False):
            if self._check:
                self._compare_counts(send_counts, recv_counts)
            self._moves.all_to_all_v(_same(given, taken), sends, taken.bytes, receives)
        return out

    def send(self, x: Any, peer: int, algorithm: str | None = None, stream: Any = None) -> None:
        """See `unisono.Communicator.send`. To another node it returns when x may be overwritten."""
        self._check_peer("destination", peer, alone=True)
        given = self._array(x, "x")
        with self._call("send", given, algorithm=algorithm, together=False):
            if len(given.bytes):
                self._moves.send_recv(given.bytes, peer, None, None)

    def recv(self, out: Any, peer: int, algorithm: str | None = None, stream: Any = None) -> Any:
        """See `unisono.Communicator.recv`."""
        self._check_peer("source", peer, alone=True)
        taken = self._array(out, "out", written=True)
        with self._call("recv", taken, algorithm=algorithm, together=False):
            if len(taken.bytes):
                self._moves.send_recv(None, None, taken.bytes, peer)
        return out

    def send_recv(
        self, x: Any, dst: int, out: Any, src: int, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.send_recv`."""
        self._check_peer("destination", dst)
        self._check_peer("source", src)
        if (dst == self.rank) != (src == self.rank):
            raise UsageError("send_recv with itself needs this rank as both destination and source.")
        given = self._array(x, "x")
        out, taken = self._new_output(out, x, given, given.shape)
        self._check_overlap("send_recv", given, taken)
        with self._call("send_recv", given, algorithm=algorithm, together=False):
            if dst == self.rank:
                self._moves.space.copy(taken.bytes, given.bytes)
            elif len(given.bytes):
                self._moves.send_recv(_same(given, taken), dst, taken.bytes, src)
        return out

    # ---- what combines -------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Any, op: str = "sum", out: Any = None, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.all_reduce`.

        algorithm: one_shot, two_shot or chain (sums.py says what they do); None: by size and topology."""
        given = self._array(x, "x")
        what = self._sum(given, op)
        out, taken = self._new_output(out, x, given, given.shape)
        self._check_overlap("all_reduce", given, taken)
        if algorithm == "chain" and not self.topology.uniform:
            raise UsageError(
                "chain needs as many ranks on every node, with consecutive numbers: use two_shot, or place "
                "the ranks node by node."
            )
        with self._call("all_reduce", given, op=op, algorithm=algorithm):
            if len(given.bytes):
                sums.all_reduce(self._moves, given.bytes, taken.bytes, what, algorithm)
        return out

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        out: Any = None,
        algorithm: str | None = None,
        stream: Any = None,
    ) -> Any:
        """See `unisono.Communicator.reduce`."""
        self._check_root(root)
        given, taken = self._array(x, "x"), None
        what = self._sum(given, op)
        if self.rank == root:
            out, taken = self._new_output(out, x, given, given.shape)
            self._check_overlap("reduce", given, taken)
        with self._call("reduce", given, op=op, root=root, algorithm=algorithm):
            if len(given.bytes):
                sums.reduce(self._moves, given.bytes, taken and taken.bytes, what, root)
        return out if self.rank == root else None

    def reduce_scatter(
        self, x: Any, op: str = "sum", out: Any = None, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.reduce_scatter`."""
        given = self._array(x, "x")
        what = self._sum(given, op)
        out, taken = self._new_output(out, x, given, self._without_ranks(given))
        self._check_overlap("reduce_scatter", given, taken, 0, self.rank * len(taken.bytes))
        with self._call("reduce_scatter", given, op=op, algorithm=algorithm):
            if len(given.bytes):
                sums.reduce_scatter(self._moves, given.bytes, taken.bytes, what)
        return out

    # ---- memory and plan -----------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = "float32", device: str | None = None) -> Any:
        """See `unisono.Communicator.empty`: symmetric among the ranks of a node."""
        with self._call("empty"):
            return self.local.empty(shape, dtype, device)

    @staticmethod
    def algorithms(collective: str, device: str = "cpu") -> list[str]:
        """The names that `algorithm` may have for a collective: of how nodes work together."""
        return list(sums.ALGORITHMS) if collective == "all_reduce" else []

    def plan(self, collective: str, bytes: int, symmetric: bool = False, device: str | None = None) -> str:
        """The algorithm that is taken between nodes."""
        return sums.choose(self._moves, bytes) if collective == "all_reduce" else "rails"

    def set_plan(self, entries: Any, device: str | None = None) -> None:
        """See `unisono.Communicator.set_plan`: of the calls within the node."""
        self.local.set_plan(entries, device)

    # ---- checks --------------------------------------------------------------------------------------------

    @contextmanager
    def _call(
        self,
        name: str,
        array: _Array | None = None,
        *,
        op: str | None = None,
        root: int | None = None,
        algorithm: str | None = None,
        together: bool = True,
        counted: bool = True,
    ) -> Iterator[None]:
        """A call from its checks to its end; what goes wrong in it fails the communicator."""
        if self.closed:
            raise UsageError(f"the communicator is closed: make a new one to call {name}.")
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        known = self.algorithms(name)
        if algorithm is not None and algorithm not in known:
            choice = f"use one of {', '.join(known)}" if known else "leave it out"
            raise UsageError(f"{name} across nodes has no algorithm '{algorithm}': {choice}.")
        self._calls += 1
        try:
            if self._check and together:
                self._compare(_words(name, array if counted else None, op, root, algorithm))
            yield
        except UsageError:
            raise
        except UnisonoError as error:
            self._failure = error
            abandon()  # where MPI has started the ranks, its end would wait for those that are out of reach
            self.local.fail(str(error), isinstance(error, TimeoutError))
            raise
        except BaseException:
            self.close()  # in the middle of a call: the peers cannot go on with this rank
            raise

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
        self._moves.all_gather(np.frombuffer(data, np.uint8), told)
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

    def _array(self, x: Any, what: str, written: bool = False) -> _Array:
        array = _Array(*_core.describe(x, what, written))
        if array.bytes is None:
            raise UsageError(f"{what} is on a GPU: make the communicator with device=, on every rank.")
        return array

    def _new_output(self, out: Any, like: Any, given: _Array, shape: tuple[int, ...]) -> tuple[Any, _Array]:
        out = _core.empty_like(like, shape) if out is None else out
        return out, self._output(out, like, given, shape)

    def _output(self, out: Any, like: Any, given: _Array, shape: tuple[int, ...]) -> _Array:
        taken = self._array(out, "out", written=True)
        if taken.dtype != given.dtype:
            raise UsageError(f"out has dtype {taken.dtype}, but x has {given.dtype}: give both the same.")
        if taken.shape != shape:
            raise UsageError(f"out has shape {taken.shape}: this call gives {shape}.")
        return taken

    def _check_overlap(self, name: str, x: _Array, out: _Array, at_in: int = 0, at_out: int = 0) -> None:
        """Of two buffers in place, the input begins `at_in` bytes into the output, or the output `at_out`
        bytes into the input."""
        apart = x.address + len(x.bytes) <= out.address or out.address + len(out.bytes) <= x.address
        if not apart and x.address + at_out != out.address + at_in:
            raise UsageError(
                f"the input and the output of {name} overlap without being in place (equal, or this rank's "
                "own block of the larger one): pass buffers that are in place or apart."
            )

    def _without_ranks(self, array: _Array) -> tuple[int, ...]:
        if not array.shape or array.shape[0] != self.size:
            raise UsageError(f"x has shape {array.shape}: its first axis is the ranks, {self.size}.")
        return array.shape[1:]

    def _sum(self, array: _Array, op: str) -> sums.Sum:
        if op not in OPS:
            raise UsageError(f"there is no op '{op}': use sum, prod, min, max or avg.")
        return sums.Sum(array.dtype, op, array.item, self.size)

    def _parts(self, counts: Sequence[int], kind: str, array: _Array) -> list[tuple[int, int]]:
        if len(counts) != self.size:
            raise UsageError(
                f"all_to_all_v needs {self.size} {kind} counts, one for each rank, not {len(counts)}."
            )
        if any(count < 0 for count in counts):
            raise UsageError(f"all_to_all_v has a {kind} count below 0: give the number of elements.")
        lengths = [int(count) * array.item for count in counts]
        return list(zip(accumulate(lengths, initial=0), lengths, strict=False))

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise UsageError(f"root {root} is not a rank: there are ranks 0 to {self.size - 1}.")

    def _check_peer(self, what: str, peer: int, alone: bool = False) -> None:
        if not 0 <= peer < self.size:
            raise UsageError(f"{what} {peer} is not a rank: there are ranks 0 to {self.size - 1}.")
        if alone and peer == self.rank:
            raise UsageError(f"rank {peer} cannot send to itself alone: use send_recv, which copies.")


def _same(given: _Array, taken: _Array) -> Any:
    """The input's bytes: the output's own where the call is in place."""
    return taken.bytes if given.address == taken.address else given.bytes


def _words(name: str, array: _Array | None, op: str | None, root: int | None, algorithm: str | None) -> str:
    """A call as its ranks compare it: "all_reduce(sum) of 1024 f32"."""
    words = name + (f"({op})" if op else "")
    if array is not None:
        words += f" of {len(array.bytes) // array.item} {array.dtype}"
    words += f" with root {root}" if root is not None else ""
    return words + (f" by {algorithm}" if algorithm else "")


def _asked_for() -> bool:
    text = os.environ.get("UNISONO_CHECK") or "0"
    try:
        return float(text) != 0
    except ValueError:
        raise UsageError(f"UNISONO_CHECK={text} is not a number: set it to 1, or unset it.") from None
