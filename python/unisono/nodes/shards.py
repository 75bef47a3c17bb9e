"""What is combined, and how arrays are cut for that."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import _core
from .moves import Moves

__all__ = ["Sum", "cut", "padded"]

_INTEGERS = frozenset({"i8", "u8", "i32", "i64"})


class Sum(NamedTuple):
    """What is combined. `exact`: a partial result needs no more than the dtype itself."""

    dtype: str
    op: str
    item: int  # bytes of an element
    ranks: int

    @property
    def exact(self) -> bool:
        """Minima, maxima, integers that wrap, and floats that are combined in their own type."""
        if self.op in ("min", "max"):
            return True
        return self.op != "avg" and (self.dtype in _INTEGERS or self.dtype in ("f32", "f64"))

    @property
    def wide(self) -> int:
        """Bytes of an element of a partial result."""
        return self.item if self.exact else _core.wide_bytes(self.dtype)


def cut(array: Any, count: int) -> list[Any]:
    """`count` equal parts."""
    n = len(array) // count
    return [array[index * n : (index + 1) * n] for index in range(count)]


def padded(moves: Moves, x: Any, item: int, parts: int) -> Any:
    """`x`, or a copy that is long enough to be cut into as many equal parts."""
    length = -(-len(x) // (item * parts)) * item * parts
    if length == len(x):
        return x
    longer = moves.space.scratch("padded", length)
    moves.space.copy(longer[: len(x)], x)
    return longer
