"""Rows that a caller has quantised, with their scales, as `unisono.Moe.dispatch` takes them."""

from __future__ import annotations

import math

import torch

from ..errors import UsageError

__all__ = ["by_columns", "dtype_name", "plain", "scale_bytes", "with_scales"]

_COMBINED = (torch.bfloat16, torch.float16, torch.float32)


def dtype_name(rows: torch.Tensor) -> str:
    """Returns the dtype of a Moe for such rows: their own if it can be combined, else bfloat16."""
    return str(rows.dtype if rows.dtype in _COMBINED else torch.bfloat16).removeprefix("torch.")


def scale_bytes(hidden: int) -> int:
    """Returns the bytes of a row's scales for which there is room: one for 16 elements, or 4 for 128."""
    return max(-(-hidden // 16), 4 * -(-hidden // 128))


def plain(rows: torch.Tensor) -> torch.Tensor:
    """Returns the same rows without gaps and gradient, elements of a byte as uint8.

    So rows of any such dtype travel, also of one that `unisono` does not know.
    """
    rows = rows.detach().contiguous()
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


def with_scales(rows: torch.Tensor, scales: torch.Tensor | None, hidden: int) -> tuple[torch.Tensor, ...]:
    """Returns the rows, and the scales, if there are any, as their payload. hidden: of the Moe."""
    if scales is None:
        return (plain(rows),)
    most = scale_bytes(hidden)
    width = math.prod(scales.shape[1:]) * scales.dtype.itemsize
    if width > most:
        raise UsageError(
            f"the scales of a row have {width} bytes, but there is room for {most}: give fewer scales a row."
        )
    return plain(rows), plain(scales)


def by_columns(scales: torch.Tensor) -> torch.Tensor:
    """Returns a copy of [rows, columns] that lies column by column, each from a multiple of 16 bytes on."""
    rows, columns = scales.shape
    unit = 16 // scales.dtype.itemsize
    aligned = scales.new_empty(columns, -(-rows // unit) * unit).t()[:rows]
    return aligned.copy_(scales)
