"""The communicator of ranks on several nodes: the methods of `unisono.Communicator`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from .. import _core
from ..errors import ResourceError, UsageError
from . import quantised, sums
from .calls import Calls, same, spans
from .engine import Part
from .moves import Moves

__all__ = ["HierarchicalCommunicator"]


class HierarchicalCommunicator(Calls):
    """The ranks of several nodes. Made by unisono.init() where it finds that.

    Methods, arguments, results and errors are those of `unisono.Communicator` (see there), and so are the
    bits of sums. Within a node data goes the way of `local`, the communicator of its ranks; between nodes
    over an engine: MPI where it has started the ranks, else gloo; on GPUs NCCL. After an error of
    communication it is failed: every call raises that error.

    Attributes:
        rank, size: this rank's number, from 0, and how many there are on all nodes.
        topology: which ranks share a node.
        local: the communicator of this node's ranks.
    """

    def __enter__(self) -> HierarchicalCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        node, nodes = self.topology.node, len(self.topology.nodes)
        return f"<HierarchicalCommunicator: rank {self.rank} of {self.size}, node {node} of {nodes}>"

    # ---- what moves ----------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self._again("barrier", None) is NotImplemented:
            with self._call("barrier"):
                self._play(None, None, Moves.barrier)

    def broadcast(
        self, x: Any, root: int = 0, out: Any = None, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.broadcast`."""
        done = self._again("broadcast", x, out, "sum", root, algorithm, stream)
        if done is not NotImplemented:
            return done
        given = self._array(x, "x", written=out is None and self.rank != root)
        taken = given if out is None else self._output(out, given, given.shape)
        self._check_call("broadcast", given, taken, given.elements, root)
        with self._call("broadcast", given, root=root, algorithm=algorithm, stream=stream):
            self._play(given, taken, lambda way: way.broadcast(given.bytes, taken.bytes, root))
        return x if out is None else out

    def all_gather(self, x: Any, out: Any = None, algorithm: str | None = None, stream: Any = None) -> Any:
        """See `unisono.Communicator.all_gather`."""
        done = self._again("all_gather", x, out, "sum", 0, algorithm, stream)
        if done is not NotImplemented:
            return done
        given = self._array(x, "x")
        out, taken = self._new_output(out, x, given, (self.size, *given.shape), stream)
        self._check_call("all_gather", given, taken, given.elements)
        with self._call("all_gather", given, algorithm=algorithm, stream=stream):
            self._play(given, taken, lambda way: way.all_gather(given.bytes, taken.bytes).wait())
        return out

    def gather(
        self, x: Any, root: int = 0, out: Any = None, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.gather`."""
        done = self._again("gather", x, out, "sum", root, algorithm, stream)
        if done is not NotImplemented:
            return done
        given, taken = self._array(x, "x"), None
        if self.rank == root:
            out, taken = self._new_output(out, x, given, (self.size, *given.shape), stream)
        self._check_call("gather", given, taken, given.elements, root)
        with self._call("gather", given, root=root, algorithm=algorithm, stream=stream):
            self._play(given, taken, lambda way: way.gather(given.bytes, taken and taken.bytes, root).wait())
        return out if self.rank == root else None

    def scatter(
        self, x: Any, root: int = 0, out: Any = None, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.scatter`."""
        done = self._again("scatter", x, out, "sum", root, algorithm, stream)
        if done is not NotImplemented:
            return done
        if x is None:
            if self.rank == root:
                raise UsageError(f"scatter needs x at the root, rank {root}.")
            if out is None:
                raise UsageError("scatter without x needs out, which says the shape and dtype.")
            given, taken = None, self._array(out, "out", written=True)
        else:
            given = self._array(x, "x")
            out, taken = self._new_output(out, x, given, self._without_ranks(given), stream)
        self._check_call("scatter", given or taken, taken, taken.elements, root)
        with self._call("scatter", taken, root=root, algorithm=algorithm, stream=stream):
            whole = given.bytes if given and self.rank == root else None
            self._play(given, taken, lambda way: way.scatter(whole, taken.bytes, root))
        return out

    def all_to_all(self, x: Any, out: Any = None, algorithm: str | None = None, stream: Any = None) -> Any:
        """See `unisono.Communicator.all_to_all`."""
        done = self._again("all_to_all", x, out, "sum", 0, algorithm, stream)
        if done is not NotImplemented:
            return done
        given = self._array(x, "x")
        self._without_ranks(given)
        out, taken = self._new_output(out, x, given, given.shape, stream)
        self._check_call("all_to_all", given, taken, given.elements // self.size)
        with self._call("all_to_all", given, algorithm=algorithm, stream=stream):
            x = same(given, taken)
            self._play(given, taken, lambda way: way.all_to_all(x, taken.bytes).wait())
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
        sends, receives = _core.read_counts(x, send_counts, recv_counts)
        out, taken = self._new_output(out, x, given, (sum(receives),), stream)
        _core.check_counts(self.rank, self.size, given.address, taken.address, given.dtype, sends, receives)
        with self._call("all_to_all_v", given, algorithm=algorithm, stream=stream, counted=False):
            if self.check:
                self._compare_counts(sends, receives)
            self._way(given).all_to_all_v(
                same(given, taken), spans(sends, given.item), taken.bytes, spans(receives, given.item)
            )
        return out

    def send(self, x: Any, peer: int, algorithm: str | None = None, stream: Any = None) -> None:
        """See `unisono.Communicator.send`. To another node it returns when x may be overwritten."""
        if self._again("send", x, None, "sum", peer, algorithm, stream) is not NotImplemented:
            return
        given = self._array(x, "x")
        ends = (given.address, 0, given.elements, given.dtype)
        _core.check_pair("send", self.rank, self.size, *ends, peer, -1)
        with self._call("send", given, algorithm=algorithm, stream=stream, together=False):
            self._play(given, None, lambda way: way.send_recv(given.bytes, peer, None, None))

    def recv(self, out: Any, peer: int, algorithm: str | None = None, stream: Any = None) -> Any:
        """See `unisono.Communicator.recv`."""
        if self._again("recv", None, out, "sum", -1, algorithm, stream, source=peer) is not NotImplemented:
            return out
        taken = self._array(out, "out", written=True)
        ends = (0, taken.address, taken.elements, taken.dtype)
        _core.check_pair("recv", self.rank, self.size, *ends, -1, peer)
        with self._call("recv", taken, algorithm=algorithm, stream=stream, together=False):
            self._play(None, taken, lambda way: way.send_recv(None, None, taken.bytes, peer))
        return out

    def send_recv(
        self, x: Any, dst: int, out: Any, src: int, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.send_recv`."""
        done = self._again("send_recv", x, out, "sum", dst, algorithm, stream, source=src)
        if done is not NotImplemented:
            return done
        given = self._array(x, "x")
        out, taken = self._new_output(out, x, given, given.shape, stream)
        ends = (given.address, taken.address, given.elements, given.dtype)
        _core.check_pair("send_recv", self.rank, self.size, *ends, dst, src)
        with self._call("send_recv", given, algorithm=algorithm, stream=stream, together=False):
            x = same(given, taken)
            if dst == self.rank:
                self._play(given, taken, lambda way: way.space.copy(taken.bytes, x))
            else:
                self._play(given, taken, lambda way: way.send_recv(x, dst, taken.bytes, src))
        return out

    def batch_send_recv(
        self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]], stream: Any = None
    ) -> None:
        """See `unisono.Communicator.batch_send_recv`."""
        _core.check_batch(self.rank, self.size, sends, recvs)
        given = [(self._array(x, "x"), peer) for x, peer in sends]
        taken = [(self._array(out, "out", written=True), peer) for out, peer in recvs]
        if not given and not taken:
            return
        parts = [[Part(peer, array.bytes) for array, peer in some] for some in (given, taken)]
        first = (given or taken)[0][0]
        with self._call("batch_send_recv", first, stream=stream, together=False):
            self._way(first).batch_send_recv(*parts)

    # ---- what combines -------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        out: Any = None,
        algorithm: str | None = None,
        stream: Any = None,
        wire: str | None = None,
    ) -> Any:
        """See `unisono.Communicator.all_reduce`.

        algorithm: one_shot, two_shot or chain (sums.py says what they do); None: by size and topology.
        wire: by two_shot, which crosses between two nodes of L ranks with (L + 1) / 2 bytes an element: from
        7 ranks on each it sends no less than an exact sum by chain."""
        done = self._again("all_reduce", x, out, op, 0, algorithm, stream, wire)
        if done is not NotImplemented:
            return done
        given = self._array(x, "x")
        out, taken = self._new_output(out, x, given, given.shape, stream)
        self._check_call("all_reduce", given, taken, given.elements, op=op, wire=wire)
        what = sums.Sum(given.dtype, op, given.item, self.size)
        if wire is not None and algorithm not in (None, "two_shot"):
            raise UsageError(f"wire={wire} runs by two_shot only, not by {algorithm}: leave algorithm out.")
        with self._call("all_reduce", given, op=op, algorithm=algorithm, stream=stream, wire=wire):
            if wire is None:
                steps = partial(sums.all_reduce, algorithm=algorithm)
            else:
                steps = partial(quantised.all_reduce, wire=wire)
            self._play(given, taken, lambda way: steps(way, given.bytes, taken.bytes, what))
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
        """See `unisono.Communicator.reduce`. algorithm: one_shot, two_shot, chain or None."""
        done = self._again("reduce", x, out, op, root, algorithm, stream)
        if done is not NotImplemented:
            return done
        given, taken = self._array(x, "x"), None
        if self.rank == root:
            out, taken = self._new_output(out, x, given, given.shape, stream)
        self._check_call("reduce", given, taken, given.elements, root, op)
        what = sums.Sum(given.dtype, op, given.item, self.size)
        with self._call("reduce", given, op=op, root=root, algorithm=algorithm, stream=stream):
            whole = taken and taken.bytes
            self._play(given, taken, lambda way: sums.reduce(way, given.bytes, whole, what, root, algorithm))
        return out if self.rank == root else None

    def reduce_scatter(
        self, x: Any, op: str = "sum", out: Any = None, algorithm: str | None = None, stream: Any = None
    ) -> Any:
        """See `unisono.Communicator.reduce_scatter`. algorithm: two_shot, chain or None."""
        done = self._again("reduce_scatter", x, out, op, 0, algorithm, stream)
        if done is not NotImplemented:
            return done
        given = self._array(x, "x")
        out, taken = self._new_output(out, x, given, self._without_ranks(given), stream)
        self._check_call("reduce_scatter", given, taken, taken.elements, op=op)
        what = sums.Sum(given.dtype, op, given.item, self.size)
        with self._call("reduce_scatter", given, op=op, algorithm=algorithm, stream=stream):
            self._play(
                given, taken, lambda way: sums.reduce_scatter(way, given.bytes, taken.bytes, what, algorithm)
            )
        return out

    # ---- memory and plan -----------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = "float32", device: str | None = None) -> Any:
        """See `unisono.Communicator.empty`: symmetric among the ranks of a node."""
        with self._call("empty"):
            try:
                return self.local.empty(shape, dtype, device)
            except (ResourceError, TypeError) as error:  # no rank of this node has it: nothing is lost
                refused = error
        raise refused

    def plan(
        self,
        collective: str,
        bytes: int,
        symmetric: bool = False,
        device: str | None = None,
        in_place: bool = False,
        wide: float = 1,
        root: int = 0,
    ) -> str:
        """The algorithm that is taken between nodes. wide: how many times as large as an input its partial
        sums are (f16 and bf16: 2). root: of a reduce."""
        known = self.algorithms(collective)
        return sums.choose(collective, self._moves, bytes, wide, root) if known else "rails"

    def set_plan(self, entries: Any, device: str | None = None) -> None:
        """See `unisono.Communicator.set_plan`: of the calls within the node."""
        self.local.set_plan(entries, device)

    @property
    def card(self) -> str:
        """See `unisono.Communicator.card`."""
        return str(self.local.card)

    @property
    def peer_access(self) -> bool:
        """See `unisono.Communicator.peer_access`: within the node."""
        return bool(self.local.peer_access)

    @property
    def nvlink(self) -> bool:
        """See `unisono.Communicator.nvlink`: within the node."""
        return bool(self.local.nvlink)

    def sms(
        self, collective: str, bytes: int, algorithm: str, symmetric: bool = False, in_place: bool = False
    ) -> int:
        """See `unisono.Communicator.sms`: of that collective within the node, by its own plan."""
        inside = self.local.plan(collective, bytes, symmetric, "cuda", in_place)
        return int(self.local.sms(collective, bytes, inside, symmetric, in_place))
