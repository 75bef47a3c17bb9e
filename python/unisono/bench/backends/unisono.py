"""Unisono itself. `unisono:two_shot` forces that algorithm in every case whose collective has it.
`unisono:two_shot@128x256x8192` also forces the kernel's shape: blocks, threads and bytes of a piece.
`unisono:fp8` quantises the all_reduces. `unisono:apart` is of fused norms and matmuls: the collective
as a whole and the rest as a whole, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from unisono import tables, traits
from unisono.bench import pairs
from unisono.bench.backends import matmuls, norms, sends
from unisono.bench.backends.base import Backend, Buffers, Ranks, ResultCall, moe_call
from unisono.bench.backends.gloo import GlooBackend
from unisono.bench.backends.unisono_moe import Moes, UnisonoMoe
from unisono.bench.cases import CaseError
from unisono.bench.cuda.memory import tensor_of
from unisono.bench.cuda.streams import Fork
from unisono.bench.cuda.temporaries import Temporaries
from unisono.errors import UsageError
from unisono.records import Case, vocabulary
from unisono.records.vocabulary import COLLECTIVES, DEVICES, KNOWN, WIRES

MOST_BLOCKS = 128  # of a kernel: so many are always resident at once


def all_algorithms() -> list[str]:
    """Returns the names of all algorithms of all collectives."""
    import unisono

    known = unisono.Communicator.algorithms
    found = [known(name, device) for device in (*DEVICES, "nodes") for name in COLLECTIVES]
    return list(dict.fromkeys(algorithm for names in found for algorithm in names))


def bound(comm: Any, case: Case, buffers: Buffers, options: dict[str, Any]) -> Callable[[], object]:
    """Returns the communicator's method, bound to the case's buffers by position: the fastest way to call."""
    x, out, rank, n = buffers.x, buffers.out, comm.rank, comm.size
    if case.collective == "send_recv":
        return partial(comm.send_recv, x, (rank + 1) % n, out, (rank - 1) % n, **options)
    if case.collective == "all_to_all_v":
        counts = list(buffers.send_counts), list(buffers.recv_counts)
        return partial(comm.all_to_all_v, x, *counts, out, **options)
    known = KNOWN[case.collective]
    arguments: list[Any] = [x]
    arguments += [case.root] if known.rooted else []
    arguments += [case.op] if known.reduces else []
    return partial(getattr(comm, case.collective), *arguments, out, **options)


class UnisonoBackend(Backend):
    """Calls the communicator's methods on numpy arrays, on GPUs on torch tensors and the bench's stream."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    threads = True
    point_to_point = moe = norm = matmul = True

    def __init__(self, variant: str | None = None) -> None:
        self.name = f"unisono:{variant}" if variant else "unisono"
        variant, at, shape = (variant or "").partition("@")
        variant = variant or None
        if variant is not None and variant not in (known := [*all_algorithms(), *WIRES, norms.APART]):
            raise CaseError(f"unknown algorithm or wire {variant!r}: choose from {', '.join(known)}.")
        self._shape = shape_of(shape) if at else None
        self.wire = variant if variant in WIRES else None
        self.wire_bits = WIRES.get(self.wire or "")
        self.bit_exact = self.wire is None
        self._forced = None if self.wire else variant
        self._comm: Any = None
        self._queued: dict[str, Any] = {}  # further arguments of a call on a GPU
        self._device = "cpu"
        self._any_memory = False  # this rank reaches any memory of its peers
        self._one: Any = None
        self._ranks: Ranks | None = None
        self._moes: Moes | None = None
        self._peers: tuple[Fork, list[Any]] | None = None
        self._temporaries: Temporaries | None = None  # of matmuls, on GPUs

    def version(self) -> str:
        import unisono

        words = [str(getattr(unisono, "__version__", ""))]
        if self._comm is not None:
            name = tables.name_of(self._comm)
            words += [f"plan table {name}"] if name else []
        if self.staged():
            words.append("staged through pinned host memory")
        return ", ".join(words)

    @property
    def _across(self) -> bool:
        """Returns whether the ranks are on several nodes."""
        return len(self._comm.nodes) > 1

    def staged(self) -> bool:
        return self._device == "cuda" and not self._comm.peer_access

    def setup(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._comm = ranks.communicator  # owns the symmetric buffers; the bench closes it
        asarray: Callable[[Any], Any] = np.asarray
        if ranks.device is not None:
            import torch

            asarray = partial(tensor_of, device=f"cuda:{ranks.device}")
            self._device, self._queued = "cuda", {"stream": ranks.stream}
            self._one = torch.zeros(1, dtype=torch.int32, device=f"cuda:{ranks.device}")
        elif reaches_peers(self._forced or ""):
            self._any_memory = reach_any_memory(self._comm)
        self._moes = Moes(self._comm, asarray, self._queued)

    def expect(self, cases: Sequence[Case]) -> None:
        assert self._moes is not None
        self._moes.expect(cases)
        if any(case.matmul is not None for case in cases):
            self._expect_matmuls()

    def _expect_matmuls(self) -> None:
        if self._device == "cuda":
            self._temporaries = Temporaries()
        elif find_spec("torch"):
            import torch

            torch.set_num_threads(1)  # one rank is one core

    def supports(self, case: Case) -> str | None:
        if case.moe is not None:
            alone = self._forced is None and self.wire is None
            return None if alone else "a mixture of experts has no choice of algorithm."
        if case.norm is not None:
            return self._forbids_norm(case)
        if case.matmul is not None:
            return self._forbids_matmul(case)
        if self._forced == norms.APART:
            return "apart is a form of fused calls."
        if self._shape is not None and (self._device != "cuda" or self._across):
            return "kernels have a shape, and only those on GPUs of one node."
        if self._shape is not None and case.streams == "per-peer":
            return "on a stream per peer other communicators call, whose kernels are cut as pays."
        if self.wire is not None:
            fits = case.dtype in ("f32", "f16", "bf16") and case.op in ("sum", "avg")
            if case.collective != "all_reduce" or not fits:
                return f"{self.wire} is for all_reduce only, sum and avg of f32, f16 and bf16."
        return None if self._forced is None else self._forbids(case, self._forced)

    def _forbids(self, case: Case, forced: str) -> str | None:
        known = list(self._comm.algorithms(_verb(case), "nodes" if self._across else self._device))
        if forced not in known:
            choice = ", ".join(known) or "no choice"
            return f"{case.collective} has no algorithm {forced}: it has {choice}."
        if self._across:  # any memory is allowed
            if forced == "chain" and not is_uniform(self._comm.nodes):
                return "chain needs as many ranks on every node, with consecutive numbers."
            return None
        what, how = traits.collective(case.collective), traits.algorithm(forced)
        overwrites = (what.swaps and how.direct) or (what.combines and forced == "copy_engine")
        if case.placement == "in_place" and overwrites:
            return f"{forced} needs another output than the input here."
        if (case.collective, forced) == ("reduce", "copy_engine") and case.ranks > 2:
            return "a reduce by copy engines is for two ranks."
        if how.pieces == "lines" and self._device == "cuda" and not self._comm.nvlink:
            return f"{forced} needs GPUs with peer access over NVLink."
        if reaches_peers(self._forced or ""):
            # On GPUs the receiver decides, by its own memory.
            receiver = self._device == "cuda" and _verb(case) in ("send_recv", "all_to_all_v")
            if case.memory != "symmetric" and not self._any_memory and not receiver:
                return f"{forced} needs symmetric memory here."
            if self.staged():
                return f"{forced} needs GPUs with peer access."
        return None

    def _forbids_norm(self, case: Case) -> str | None:
        known = (norms.APART,) if self._across else norms.ALGORITHMS[self._device]
        if self._shape is None and self.wire is None and self._forced in (None, *known):
            return None
        return f"{case.collective} has no {self.name.partition(':')[2]}: it has {', '.join(known)}."

    def _forbids_matmul(self, case: Case) -> str | None:
        if self._forced is not None and case.collective == vocabulary.MATMUL:
            return "a matmul alone has one form."
        if self._shape is None and self.wire is None and self._forced in (None, norms.APART):
            return matmuls.lacking(case)
        return f"{case.collective} has no {self.name.partition(':')[2]}: it has {norms.APART}."

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        if case.moe is not None:
            assert self._moes is not None
            return moe_call(case, UnisonoMoe(self._moes, case, buffers))
        if case.norm is not None:
            return norms.by_unisono(self._comm, case, buffers, self._forced, self._queued)
        if case.matmul is not None:
            return self._matmul(case, buffers)
        call = self._prepared(case, buffers)
        return call if self._shape is None else partial(self._in_shape, call)

    def _matmul(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        tensor = GlooBackend.tensor if self._device == "cpu" else lambda tensor, _: tensor
        of = matmuls.tensors(case, self._comm.rank, buffers, tensor)
        call = matmuls.by_unisono(self._comm, case, of, 1 if self._forced else None)
        if self._temporaries is None or not isinstance(call, ResultCall):
            return call
        return self._temporaries.bound(call)

    def _in_shape(self, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, made with the forced shape of kernels, if any."""
        if self._shape is None:
            return call()
        self._comm._set_shape(*self._shape)
        try:
            return call()
        finally:
            self._comm._reset_shape()

    def _prepared(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        comm = self._comm
        if self._device == "cuda" and case.memory == "symmetric" and KNOWN[case.collective].rooted:
            # Zero-copy needs the place from every rank.
            buffers = replace(buffers, x=buffers.x_place, out=buffers.out_place)
        if case.collective == "barrier":
            if self._one is not None:  # on a stream: the smallest sum, as for nccl
                return partial(comm.all_reduce, self._one, "sum", self._one, **self._queued)
            return partial(comm.barrier)
        options: dict[str, Any] = {"algorithm": self._forced} if self._forced else {}
        options |= self._queued
        if self.wire is not None:
            options["wire"] = self.wire
        if case.collective == vocabulary.PINGPONG:
            return self._pingpong(case, buffers.x, buffers.out, options)
        if case.streams:
            return self._all_to_all(case, buffers.x, buffers.out, options)
        return bound(comm, case, buffers, options)

    def _pingpong(self, case: Case, x: Any, out: Any, options: dict[str, Any]) -> Callable[[], object]:
        comm, peer = self._comm, pairs.peer_of(case, self._comm.rank)
        verbs = {
            "send": partial(comm.send, x, peer, **options),
            "recv": partial(comm.recv, out, peer, **options),
            "exchange": partial(comm.send_recv, x, peer, out, peer, **options),
        }
        return sends.pingpong(case, comm.rank, verbs.__getitem__)

    def _all_to_all(self, case: Case, x: Any, out: Any, options: dict[str, Any]) -> Callable[[], object]:
        """Returns one batch of all messages, or sends and receives on a stream per peer. Each stream then has
        a communicator of its own, since calls of one communicator follow each other."""
        rank, n = self._comm.rank, self._comm.size
        if case.streams == "per-peer":
            order = sends.steps(rank, n)
            fork, comms = self._forked()
            calls = [
                partial(comm.send_recv, x[to], to, out[source], source, **{**options, "stream": stream})
                for comm, stream, (to, source) in zip(comms, fork.handles, order, strict=True)
            ]
            return sends.in_turn([fork.bound(calls), sends.own_block(x, out, rank)])
        sent = [(x[to], to) for to in range(n)]
        return partial(self._comm.batch_send_recv, sent, [(out[r], r) for r in range(n)], **options)

    def _forked(self) -> tuple[Fork, list[Any]]:
        """Returns a stream and a communicator for each peer, made in the first call. Collective."""
        if self._peers is None:
            import unisono
            from unisono.bench.cuda.device import LIBRARY_S

            assert self._ranks is not None
            rank, size = self._ranks.rank, self._ranks.size
            most = MOST_BLOCKS // max(size - 1, 1)  # all kernels must be resident: they wait for their peers
            how: dict[str, Any] = {"device": self._ranks.device, "max_sms": most, "lane": "host"}
            comms = [unisono.init(rank, size, self._ranks, LIBRARY_S, **how) for _ in range(size - 1)]
            self._peers = Fork(size - 1), comms
        return self._peers

    def close(self) -> None:
        if self._moes is not None:
            self._moes.close()
        if self._peers is not None:
            for comm in self._peers[1]:
                comm.close()
            self._peers = None

    @contextmanager
    def checked(self) -> Iterator[None]:
        before, self._comm.check = self._comm.check, True
        try:
            yield
        finally:
            self._comm.check = before

    def algorithm(self, case: Case) -> str | None:
        if case.moe is not None:
            return None
        if case.norm is not None or case.matmul is not None:  # the library does not say what it chooses
            return self._forced
        if self._forced or (case.collective == "barrier" and self._one is None):
            return self._forced
        if case.collective == "barrier":
            return str(self._comm.plan("all_reduce", 4, False, self._device))
        size = case.bytes // case.ranks if case.streams else case.bytes
        # A single send or receive, and a call of another communicator, is planned as on plain memory.
        alone = case.pattern in ("half_round_trip", "one_way") or case.streams is not None
        symmetric = case.memory == "symmetric" and not alone
        in_place = case.placement == "in_place"
        return str(self._comm.plan(_verb(case), size, symmetric, self._device, in_place, self.wire))

    def sms(self, case: Case) -> int | None:
        if case.norm is not None or case.matmul is not None:
            return None
        algorithm = self.algorithm(case)
        if self._device != "cuda" or algorithm is None or case.streams == "per-peer":  # several kernels
            return None
        if self.wire is not None:  # the library does not say
            return None
        collective = "all_reduce" if case.collective == "barrier" else _verb(case)
        symmetric, size = case.memory == "symmetric", max(4, case.bytes)
        in_place = case.placement == "in_place"
        return int(self._in_shape(partial(self._comm.sms, collective, size, algorithm, symmetric, in_place)))

    def raise_if_failed(self) -> None:
        if self._queued:
            self._comm.synchronize(**self._queued)
            for comm in self._peers[1] if self._peers else ():
                comm.synchronize(**self._queued)


def shape_of(text: str) -> tuple[int, int, int]:
    """Returns blocks, threads and bytes of a piece; zeros: the library's choice. Raises CaseError."""
    numbers = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", text)
    if numbers is None:
        raise CaseError(f"{text!r} is no shape: BLOCKSxTHREADSxBYTES, 128x256x8192 for instance.")
    blocks, threads, piece = map(int, numbers.groups())
    return blocks, threads, piece


def is_uniform(nodes: Sequence[Sequence[int]]) -> bool:
    """Returns whether all nodes have the same number of ranks, with consecutive numbers."""
    return all(len(ranks) == len(nodes[0]) and ranks[-1] - ranks[0] + 1 == len(ranks) for ranks in nodes)


def reaches_peers(algorithm: str) -> bool:
    """Returns whether the algorithm reads or writes the peers' buffers themselves."""
    return algorithm not in ("", norms.APART) and traits.algorithm(algorithm).direct


def _verb(case: Case) -> str:
    """Returns the library's call for a case. Sends and receives share the plan of send_recv."""
    if case.streams == "one":
        return "batch_send_recv"
    return "send_recv" if case.collective == vocabulary.PINGPONG or case.streams else case.collective


def reach_any_memory(comm: Any) -> bool:
    """Returns whether a direct algorithm runs on plain memory. The operating system may forbid that, and the
    fabric lane cannot. Collective."""
    try:
        comm.all_gather(np.zeros(1, np.uint8), algorithm="direct")
    except UsageError:
        return False
    return True
