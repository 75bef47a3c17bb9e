"""What only moves, across nodes: each collective as calls within the node and one exchange between nodes, a
large broadcast as one for each of its blocks.

Everything here works on flat arrays of bytes that have been checked. Each byte crosses between two nodes once
for each node that needs it, and the ranks of a node share the work: local rank r speaks with local rank r of
the others ("rails", as NCCL calls them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from .engine import Engine, Part, Pending
from .space import Space
from .topology import Topology

__all__ = ["Moves"]

LEAST_BLOCKS = 4  # of a grain a rail, from which on a broadcast goes along a chain of nodes
MOST_GRAINS = 16  # a rail, in a block of it
_ALIGNED = 64  # bytes, at a multiple of which a part of a block begins


class _Begun:
    """A collective under way: its exchange, and what is left to do when that has ended."""

    def __init__(self, exchange: Pending | None = None, then: Callable[[], object] = lambda: None) -> None:
        self._exchange, self._then = exchange, then

    def wait(self) -> None:
        """See `Pending.wait`."""
        if self._exchange is not None:
            self._exchange.wait()
        self._then()


class Moves:
    """The movements of one rank over `local`, the communicator of its node, and `engine`."""

    def __init__(self, topology: Topology, local: Any, engine: Engine, space: Space) -> None:
        self.topology, self.local, self.engine, self.space = topology, local, engine, space

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Pending:
        """`Engine.exchange` without the parts that are empty."""
        sends = [part for part in sends if len(part.data)]
        receives = [part for part in receives if len(part.data)]
        return self.engine.exchange(sends, receives) if sends or receives else _Begun()

    def inside(self, name: str, *arguments: Any, **more: Any) -> None:
        """A collective within the node."""
        getattr(self.local, name)(*arguments, **more, **self.space.options)

    def barrier(self) -> None:
        """Returns when every rank is here."""
        place, one = self.topology, self.space.scratch("one", 1)
        self.local.barrier()
        if place.local_rank == 0:
            leaders = [place.nodes[node][0] for node in place.others]
            landing = self.space.scratch("barrier", len(leaders))
            receives = [Part(rank, landing[i : i + 1]) for i, rank in enumerate(leaders)]
            self.exchange([Part(rank, one) for rank in leaders], receives).wait()
        self.local.barrier()

    def all_gather(self, x: Any, out: Any) -> Pending:
        """`out` gets everyone's `x` in rank order; in place, `x` is its own part of `out`. What it begins
        belongs to it until `wait` has returned, which every rank of a node calls in the same order."""
        place, n = self.topology, len(x)
        receives = [
            Part(rank, out[rank * n : (rank + 1) * n])
            for node in place.others
            for index, rank in enumerate(place.nodes[node])
            if index % len(place.local) == place.local_rank
        ]
        exchange = self.exchange([Part(place.counterpart(node), x) for node in place.others], receives)
        self.space.copy(out[place.rank * n : (place.rank + 1) * n], x)
        self._share(place.local, out, n)

        def share_others() -> None:
            for node in place.others:
                self._share(place.nodes[node], out, n)

        return _Begun(exchange, then=share_others)

    def _share(self, ranks: Sequence[int], out: Any, n: int) -> None:
        """The blocks of a node's ranks, each of which has come to one local rank, to all local ranks."""
        here, first = len(self.topology.local), ranks[0]
        if len(ranks) == here and ranks[-1] == first + here - 1:
            mine = first + self.topology.local_rank
            whole = out[first * n : (first + here) * n].reshape(here, n)
            self.inside("all_gather", out[mine * n : (mine + 1) * n], whole)
            return
        for index, rank in enumerate(ranks):
            self.inside("broadcast", out[rank * n : (rank + 1) * n], index % here)

    def all_to_all(self, x: Any, out: Any, slot: int = 0) -> Pending:
        """Block p of `x` goes to rank p; in place where `x` is `out`. Begun and waited for like all_gather;
        those that are under way together have different slots."""
        place = self.topology
        n = len(x) // place.size
        if not place.uniform:
            parts = [(rank * n, n) for rank in range(place.size)]
            self.all_to_all_v(x, parts, out, parts)
            return _Begun()
        if x is out:
            x = self.space.scratch(f"in place {slot}", len(x))
            self.space.copy(x, out)
        here = len(place.local)
        sends, receives = [], []
        for node in place.others:
            first, peer = place.nodes[node][0], place.counterpart(node)
            given = x[first * n : (first + here) * n]
            if here > 1:
                given = self.space.scratch(f"packed {slot} {node}", here * n)
                self._swap(x, first * n, given, 0, n)
            sends.append(Part(peer, given))
            receives.append(Part(peer, out[first * n : (first + here) * n]))
        exchange = self.exchange(sends, receives)
        self._swap(x, place.local[0] * n, out, place.local[0] * n, n)
        return _Begun(exchange)

    def _swap(self, x: Any, at: int, out: Any, to: int, n: int) -> None:
        """The all_to_all within the node of blocks of `n` bytes that begin at `at`."""
        here = len(self.topology.local)
        given, taken = x[at : at + here * n], out[to : to + here * n]
        self.inside("all_to_all", given.reshape(here, n), taken.reshape(here, n))

    def all_to_all_v(
        self, x: Any, sends: Sequence[tuple[int, int]], out: Any, receives: Sequence[tuple[int, int]]
    ) -> None:
        """Part p of `x`, an (offset, length), goes to rank p, and part p of `out` comes from it. In place
        where `x` is `out`."""
        place, space = self.topology, self.space
        if x is out:
            x = space.scratch("in place", len(x))
            space.copy(x, out)

        def cut(array: Any, parts: Sequence[tuple[int, int]], rank: int) -> Any:
            offset, length = parts[rank]
            return array[offset : offset + length]

        remote = [rank for node in place.others for rank in place.nodes[node]]
        pending = self.exchange(
            [Part(rank, cut(x, sends, rank)) for rank in remote],
            [Part(rank, cut(out, receives, rank)) for rank in remote],
        )
        given = [sends[rank][1] for rank in place.local]
        taken = [receives[rank][1] for rank in place.local]
        packed, landed = space.scratch("packed", sum(given)), space.scratch("landed", sum(taken))
        for rank, begin, length in zip(place.local, accumulate(given, initial=0), given, strict=False):
            space.copy(packed[begin : begin + length], cut(x, sends, rank))
        self.inside("all_to_all_v", packed, given, taken, landed)
        for rank, begin, length in zip(place.local, accumulate(taken, initial=0), taken, strict=False):
            space.copy(cut(out, receives, rank), landed[begin : begin + length])
        pending.wait()

    def broadcast(self, x: Any, data: Any, root: int) -> None:
        """The root's `x` to everyone's `data`: small to each node at once, large along a chain of nodes."""
        place, grain = self.topology, self.space.grain
        rails, nodes = len(place.local), len(place.nodes)
        chained = 0
        if place.even and (rails > 1 or nodes > 2) and len(data) >= LEAST_BLOCKS * rails * grain:
            # the last node waits for nodes - 2 blocks more than the first: for a quarter of the time at most,
            # where the grain lets it
            part = min(max(len(data) // (4 * nodes * rails), grain), MOST_GRAINS * grain)
            chained = len(data) // (_ALIGNED * rails) * _ALIGNED * rails
            if place.rank == root:
                self.space.copy(data[:chained], x[:chained])
            self._broadcast_by_rails(data[:chained], root, part // _ALIGNED * _ALIGNED)
        if chained < len(data):
            self._broadcast_at_once(x[chained:], data[chained:], root)

    def _broadcast_by_rails(self, data: Any, root: int, most: int) -> None:
        """Block by block from node to node: local rank r takes part r of a block, `most` bytes, from its
        counterpart of the node before and passes it on, while the node shares the block. Every link carries
        `data` once."""
        place, rails = self.topology, len(self.topology.local)
        home, last = place.node_of[root], len(place.nodes) - 1
        hops = (place.node - home) % (last + 1)
        before, behind = (place.counterpart((place.node + step) % (last + 1)) for step in (-1, 1))
        starts = range(0, len(data), most * rails)
        blocks = [data[start : start + most * rails].reshape(rails, -1) for start in starts]

        def part(rank: int, block: int) -> list[Part]:
            return [Part(rank, blocks[block][place.local_rank])] if 0 <= block < len(blocks) else []

        for step in range(len(blocks) + last + 1):
            leaving = step - 1 - hops  # it has come in the step before; at home it has been shared then
            exchange = self.exchange(
                part(behind, leaving) if hops < last else [], part(before, leaving + 1) if hops else []
            )
            if hops == 0 and step < len(blocks):
                self.inside("broadcast", blocks[step], place.nodes[home].index(root))
            elif hops and 0 <= leaving < len(blocks):
                self.inside("all_gather", blocks[leaving][place.local_rank], blocks[leaving])
            exchange.wait()

    def _broadcast_at_once(self, x: Any, data: Any, root: int) -> None:
        place = self.topology
        home = place.node_of[root]
        index = place.nodes[home].index(root)
        heads = [ranks[index % len(ranks)] for ranks in place.nodes]
        if place.rank == root:
            pending = self.exchange([Part(heads[node], x) for node in place.others], [])
            self.space.copy(data, x)
        elif place.rank == heads[place.node]:
            pending = self.exchange([], [Part(root, data)])
            pending.wait()
        else:
            pending = _Begun()
        self.inside("broadcast", data, place.local.index(heads[place.node]))
        if place.rank == root:
            pending.wait()

    def gather(self, x: Any, out: Any, root: int) -> Pending:
        """The root's `out` gets everyone's `x`, in rank order; elsewhere it is None. Begun and waited for as
        an all_gather is."""
        place, n = self.topology, len(x)
        if place.node != place.node_of[root]:
            return self.exchange([Part(root, x)], [])
        index = place.local.index(root)
        if place.rank != root:
            self.inside("gather", x, index, None)
            return _Begun()
        remote = [rank for node in place.others for rank in place.nodes[node]]
        pending = self.exchange([], [Part(rank, out[rank * n : (rank + 1) * n]) for rank in remote])
        if place.together:
            self.inside("gather", x, index, self._of_node(out, n))
        else:
            landed = self.space.scratch("landed", len(place.local) * n).reshape(-1, n)
            self.inside("gather", x, index, landed)
            for row, rank in zip(landed, place.local, strict=True):
                self.space.copy(out[rank * n : (rank + 1) * n], row)
        return pending

    def scatter(self, x: Any, out: Any, root: int) -> None:
        """Block p of the root's `x` goes to rank p; elsewhere `x` is None."""
        place, n = self.topology, len(out)
        if place.node != place.node_of[root]:
            self.exchange([], [Part(root, out)]).wait()
            return
        index = place.local.index(root)
        if place.rank != root:
            self.inside("scatter", None, index, out)
            return
        remote = [rank for node in place.others for rank in place.nodes[node]]
        pending = self.exchange([Part(rank, x[rank * n : (rank + 1) * n]) for rank in remote], [])
        if place.together:
            packed = self._of_node(x, n)
        else:
            packed = self.space.scratch("packed", len(place.local) * n).reshape(-1, n)
            for row, rank in zip(packed, place.local, strict=True):
                self.space.copy(row, x[rank * n : (rank + 1) * n])
        self.inside("scatter", packed, index, out)
        pending.wait()

    def _of_node(self, whole: Any, n: int) -> Any:
        """The blocks of this node's ranks, which are consecutive."""
        first, here = self.topology.local[0], len(self.topology.local)
        return whole[first * n : (first + here) * n].reshape(here, n)

    def batch_send_recv(self, sends: Sequence[Part], receives: Sequence[Part]) -> None:
        """All of them at once, this rank's to itself too."""
        number = {rank: index for index, rank in enumerate(self.topology.local)}
        pending = self.exchange(
            [part for part in sends if part.rank not in number],
            [part for part in receives if part.rank not in number],
        )
        here = [
            [(part.data, number[part.rank]) for part in parts if part.rank in number]
            for parts in (sends, receives)
        ]
        if any(here):
            self.inside("batch_send_recv", *here)
        pending.wait()

    def send_recv(self, x: Any, to: int | None, out: Any, source: int | None) -> None:
        """`x` to rank `to` and `out` from rank `source`, which may be None; not to this rank itself."""
        place = self.topology
        number = {rank: index for index, rank in enumerate(place.local)}
        if x is not None and x is out:
            x = self.space.scratch("in place", len(x))
            self.space.copy(x, out)
        sends = [Part(to, x)] if to is not None and to not in number else []
        receives = [Part(source, out)] if source is not None and source not in number else []
        pending = self.exchange(sends, receives)
        if to in number and source in number:
            self.inside("send_recv", x, number[to], out, number[source])
        elif to in number:
            self.inside("send", x, number[to])
        elif source in number:
            self.inside("recv", out, number[source])
        pending.wait()
