"""What a call across nodes does, written down for the core to play when it is made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from .engine import Part
from .moves import Moves
from .space import HostSpace
from .topology import Topology

__all__ = ["record"]


def record(
    replays: _core.Replays, topology: Topology, x: Any, out: Any, play: Callable[[Moves], object]
) -> None:
    """Writes down what `play` does with the bytes of a call's input and output; either may be None."""
    recorder: Any = _Recorder(replays, x, out)
    play(Moves(topology, recorder, recorder, recorder))
    replays.keep()


class _Begun(NamedTuple):
    replays: _core.Replays
    number: int

    def wait(self) -> None:
        self.replays.wait(self.number)


class _Recorder:
    """An engine, the host's space and the communicator of a node, none of which does anything."""

    def __init__(self, replays: _core.Replays, x: Any, out: Any) -> None:
        self.options, self.grain = HostSpace().options, HostSpace.grain
        self._replays, self._begun = replays, 0
        self._known = [(base, array) for base, array in enumerate((x, out)) if array is not None]

    def _span(self, part: Any) -> tuple[int, int, int]:
        """Where some bytes are: base, offset and length."""
        begin = part.__array_interface__["data"][0]
        for base, whole in self._known:
            offset = begin - whole.__array_interface__["data"][0]
            if 0 <= offset <= whole.nbytes - part.nbytes:
                return base, offset, part.nbytes
        raise AssertionError("a call touches memory that is neither its own nor scratch")

    def _spans(self, parts: Sequence[Part]) -> list[tuple[int, tuple[int, int, int]]]:
        return [(part.rank, self._span(part.data)) for part in parts]

    def _maybe(self, part: Any) -> tuple[int, int, int] | None:
        return None if part is None else self._span(part)

    # ---- between nodes -------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> _Begun:
        self._replays.exchange(self._spans(sends), self._spans(receives))
        self._begun += 1
        return _Begun(self._replays, self._begun - 1)

    def close(self) -> None:
        pass

    # ---- on this rank --------------------------------------------------------------------------------------

    def scratch(self, name: str, size: int) -> Any:
        stands_for_it = np.empty(size, np.uint8)
        self._known.append((self._replays.scratch(name, size), stands_for_it))
        return stands_for_it

    def copy(self, to: Any, source: Any) -> None:
        self._replays.copy(self._span(to), self._span(source))

    def combine(self, out: Any, prior: Any, sources: Sequence[Any], dtype: str, op: str, ranks: int) -> None:
        self._replays.combine(
            self._span(out), self._maybe(prior), [self._span(source) for source in sources], dtype, op, ranks
        )

    # ---- within the node -----------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._replays.move("barrier")

    def broadcast(self, data: Any, root: int) -> None:
        self._replays.move("broadcast", self._span(data), self._span(data), data.nbytes, root)

    def all_gather(self, x: Any, out: Any) -> None:
        self._replays.move("all_gather", self._span(x), self._span(out), x.nbytes)

    def gather(self, x: Any, root: int, out: Any = None) -> None:
        self._replays.move("gather", self._span(x), self._maybe(out), x.nbytes, root)

    def scatter(self, x: Any, root: int, out: Any) -> None:
        self._replays.move("scatter", self._maybe(x), self._span(out), out.nbytes, root)

    def all_to_all(self, x: Any, out: Any) -> None:
        self._replays.move("all_to_all", self._span(x), self._span(out), x.nbytes // len(x))

    def all_to_all_v(self, x: Any, sends: Sequence[int], receives: Sequence[int], out: Any) -> None:
        self._replays.move("all_to_all_v", self._span(x), self._span(out), 0, 0, sends, receives)

    def send(self, x: Any, peer: int) -> None:
        self._replays.pair(self._span(x), None, peer, -1)

    def recv(self, out: Any, peer: int) -> None:
        self._replays.pair(None, self._span(out), -1, peer)

    def send_recv(self, x: Any, dst: int, out: Any, src: int) -> None:
        self._replays.pair(self._span(x), self._span(out), dst, src)

    def batch_send_recv(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        given, taken = ([(rank, self._span(part)) for part, rank in some] for some in (sends, receives))
        self._replays.batch(given, taken)
