"""Where the data of a call lies: scratch, copies and sums there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .. import _core

__all__ = ["WIRE_BLOCK", "HostSpace", "Quantised", "Space"]

Bytes = npt.NDArray[np.uint8]
WIRE_BLOCK = 32  # elements that share a scale (src/base/wire.hpp)


class Quantised(NamedTuple):
    """How an all_reduce is quantised: fp8 or int8 for elements of `dtype`."""

    wire: str
    dtype: str
    op: str


class Space(Protocol):
    """Flat arrays of bytes, and what is done with them."""

    options: dict[str, Any]  # that calls within the node take besides
    grain: int  # bytes of a message from which on its start costs little

    def scratch(self, name: str, size: int) -> Any:
        """Memory that is kept under that name, until the next call for it."""

    def copy(self, to: Any, source: Any) -> None:
        """`source` into `to`, which may be the same memory."""

    def combine(self, out: Any, prior: Any, sources: Sequence[Any], dtype: str, op: str, ranks: int) -> None:
        """Combines `sources` in order, after `prior` (wide elements, or None). ranks 0: the result stays
        wide; else it is finished for that many ranks and rounded."""

    def encode(self, out: Any, source: Any, count: int, what: Quantised) -> None:
        """`count` elements into their wire form, of `_core.wire_bytes(count)`."""

    def combine_encoded(self, out: Any, sources: Sequence[Any], count: int, what: Quantised) -> None:
        """The sum of `sources` in order, all in their wire form."""

    def decode(self, out: Any, source: Any, count: int, what: Quantised) -> None:
        """`count` elements from their wire form."""


class HostSpace:
    """Numpy arrays."""

    grain = 128 << 10

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self._kept: dict[str, Bytes] = {}

    def scratch(self, name: str, size: int) -> Bytes:
        """See `Space`."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            kept = self._kept[name] = np.empty(size, np.uint8)
        return kept[:size]

    def copy(self, to: Bytes, source: Bytes) -> None:
        """See `Space`."""
        if to.__array_interface__["data"] != source.__array_interface__["data"]:
            np.copyto(to, source)

    def combine(
        self, out: Bytes, prior: Bytes | None, sources: Sequence[Bytes], dtype: str, op: str, ranks: int
    ) -> None:
        """See `Space`."""
        _core.combine(out, prior, sources, dtype, op, ranks)

    def encode(self, out: Bytes, source: Bytes, count: int, what: Quantised) -> None:
        """See `Space`."""
        _core.requantise(out, [source], count, what.dtype, what.op, what.wire, True, False)

    def combine_encoded(self, out: Bytes, sources: Sequence[Bytes], count: int, what: Quantised) -> None:
        """See `Space`."""
        _core.requantise(out, sources, count, what.dtype, what.op, what.wire, False, False)

    def decode(self, out: Bytes, source: Bytes, count: int, what: Quantised) -> None:
        """See `Space`."""
        _core.requantise(out, [source], count, what.dtype, what.op, what.wire, False, True)
