"""Rows that a caller has quantised, with their scales, as `unisono.Moe.dispatch` takes them."""

from __future__ import annotations

import math

import torch

from ..errors import UsageError

__all__ = ["plain", "with_scales"]


def plain(rows: torch.Tensor) -> torch.Tensor:
    """Returns the same rows without gaps and gradient, elements of a byte as uint8.

    So rows of any such dtype travel, also of one that `unisono` does not know.
    """
    rows = rows.detach().contiguous()
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


def with_scales(rows: torch.Tensor, scales: torch.Tensor | None, most: int) -> tuple[torch.Tensor, ...]:
    """Returns the rows, and the scales as their payload.

    Args:
        most: the bytes of a row's scales for which there is room.
    """
    if scales is None:
        return (plain(rows),)
    width = math.prod(scales.shape[1:]) * scales.dtype.itemsize
    if width > most:
        raise UsageError(
            f"the scales of a row have {width} bytes, but there is room for {most}: give fewer scales a row."
        )
    return plain(rows), plain(scales)
