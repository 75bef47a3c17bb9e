"""Which ranks share a node, and a bootstrap for the ranks of one."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..launch.detect import NODE_VARIABLE

__all__ = ["NodeBootstrap", "Topology", "boot", "identity", "meet"]

_MOST_LETTERS = 64


def identity(env: Mapping[str, str]) -> str:
    """What ranks of one node have in common: boot, PID namespace, and network namespace or UNISONO_NODE.

    Containers of one machine differ in a namespace, so that their ranks are not taken for local ones.
    """
    named = env.get(NODE_VARIABLE, "").strip()
    if len(named) > _MOST_LETTERS:
        raise UsageError(
            f"{NODE_VARIABLE}={named[:20]}... is too long: name the node in {_MOST_LETTERS} letters"
        )
    return "/".join((boot(), _namespace("pid"), named or _namespace("net")))


def network() -> str:
    """This process's network namespace: its interfaces and addresses are those of all processes in it."""
    return f"{boot()}/{_namespace('net')}"  # every machine numbers its namespaces alike


def boot() -> str:
    """What all processes of this machine, until it starts again, have in common; "" where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    except OSError:
        return ""


@dataclass(frozen=True)
class Topology:
    """Where a rank is.

    Attributes:
        rank: this rank's number.
        nodes: the ranks of each node, in order of their first; each in rank order.
        crowded: whether this machine, with all nodes that it plays, has fewer cores than ranks: whoever waits
            must give its core away.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    crowded: bool = False

    @classmethod
    def of(cls, rank: int, identities: Sequence[str], cores: Sequence[int] = ()) -> Topology:
        """From what `identity` gave on every rank, and the cores of each as bits."""
        nodes: dict[str, list[int]] = {}
        for index, name in enumerate(identities):
            nodes.setdefault(name, []).append(index)
        boots = [name.partition("/")[0] for name in identities]
        here = [theirs for boot, theirs in zip(boots, cores, strict=False) if boot == boots[rank]]
        usable = reduce(operator.or_, here, 0).bit_count()
        return cls(rank, tuple(map(tuple, nodes.values())), len(here) > usable)

    @cached_property
    def size(self) -> int:
        """Ranks on all nodes."""
        return sum(map(len, self.nodes))

    @cached_property
    def node(self) -> int:
        """This rank's node."""
        return self.node_of[self.rank]

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.nodes[self.node]

    @cached_property
    def local_rank(self) -> int:
        """This rank's number among them."""
        return self.local.index(self.rank)

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The other nodes, beginning behind this one, so that not all turn to the same one first."""
        count = len(self.nodes)
        return tuple((self.node + step) % count for step in range(1, count))

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        found = [0] * self.size
        for node, ranks in enumerate(self.nodes):
            for rank in ranks:
                found[rank] = node
        return tuple(found)

    @cached_property
    def in_order(self) -> bool:
        """Whether each node has consecutive ranks, so that the order of nodes is that of ranks."""
        return all(map(_consecutive, self.nodes))

    @cached_property
    def together(self) -> bool:
        """Whether this node has consecutive ranks."""
        return _consecutive(self.local)

    @cached_property
    def even(self) -> bool:
        """Whether all nodes have as many ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    @cached_property
    def uniform(self) -> bool:
        """Whether all nodes have as many ranks, and consecutive ones."""
        return self.in_order and self.even

    @cached_property
    def apart(self) -> bool:
        """Whether every node has one rank only."""
        return len(self.nodes) == self.size

    @cached_property
    def peers(self) -> list[int]:
        """Every other rank."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def counterpart(self, node: int) -> int:
        """The rank of a node that this one exchanges with: of the same local rank, where there is one."""
        ranks = self.nodes[node]
        return ranks[self.local_rank % len(ranks)]

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node})"


def _consecutive(ranks: Sequence[int]) -> bool:
    return ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))


def meet(bootstrap: Any, env: Mapping[str, str]) -> Topology:
    """The topology of the ranks of a bootstrap. Collective. Raises UsageError where the bootstrap
    gives anything but bytes of every rank."""
    if bootstrap.size == 1:
        return Topology(0, ((0,),))
    mine = sum(1 << core for core in os.sched_getaffinity(0))
    told = bootstrap.all_gather(f"{mine:x} {identity(env)}".encode())
    if (
        not isinstance(told, list)
        or len(told) != bootstrap.size
        or not all(type(one) is bytes for one in told)
    ):
        raise UsageError(f"the bootstrap's all_gather gave no list of the bytes of {bootstrap.size} ranks.")
    parts = [one.decode("utf-8", "replace").partition(" ") for one in told]
    try:
        cores = [int(bits, 16) for bits, _, _ in parts]
    except ValueError:
        raise UsageError(
            "a rank is of another version of Unisono: start every rank with the same one."
        ) from None
    return Topology.of(bootstrap.rank, [name for _, _, name in parts], cores)


class NodeBootstrap:
    """The bootstrap among the ranks of one node, over that of all: every node gathers as often as others."""

    def __init__(self, whole: Any, topology: Topology) -> None:
        self._whole, self._local = whole, topology.local
        self.rank, self.size = topology.local_rank, len(topology.local)

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Bootstrap.all_gather`."""
        gathered = self._whole.all_gather(data)
        return [gathered[rank] for rank in self._local]

    def close(self) -> None:
        """The bootstrap of all is closed by whoever made it."""
