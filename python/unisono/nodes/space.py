"""Where the data of a call lies: scratch, copies and sums there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .. import _core

__all__ = ["HostSpace", "Space"]

Bytes = npt.NDArray[np.uint8]


class Space(Protocol):
    """Flat arrays of bytes, and what is done with them."""

    options: dict[str, Any]  # that calls within the node take besides

    def scratch(self, name: str, size: int) -> Any:
        """Memory that is kept under that name, until the next call for it."""

    def copy(self, to: Any, source: Any) -> None:
        """`source` into `to`, which may be the same memory."""

    def combine(self, out: Any, prior: Any, sources: Sequence[Any], dtype: str, op: str, ranks: int) -> None:
        """Combines `sources` in order, after `prior` (wide elements, or None). ranks 0: the result stays
        wide; else it is finished for that many ranks and rounded."""


class HostSpace:
    """Numpy arrays."""

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
