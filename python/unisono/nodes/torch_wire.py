"""The wire form of quantised sums in torch, for arrays on GPUs: the bytes of src/base/wire.hpp.

Codes where an element is no finite number are arbitrary: their block's scale says that it is NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from .space import WIRE_BLOCK

__all__ = ["decode", "encode"]

_NAN = 255
_INFINITY, _QUIET_NAN = 0x7F800000, 0x7FC00000
_FORMATS = {
    "int8": (torch.int8, 6, 0x010000),
    "fp8": (torch.float8_e4m3fn, 8, 0x180000),
}  # a number's type, and kTop and kCarry of wire.hpp


def encode(out: Any, values: Any, wire: str) -> None:
    """`values`, of f32, into `out`, of bytes: codes, those of zeros up to whole blocks, and scales."""
    kind, top, carry = _FORMATS[wire]
    blocks = -(-values.numel() // WIRE_BLOCK)
    rows = torch.nn.functional.pad(values, (0, blocks * WIRE_BLOCK - values.numel())).view(blocks, WIRE_BLOCK)
    largest = (rows.view(torch.int32) & 0x7FFFFFFF).amax(1).clamp(max=_INFINITY)
    scale = (((largest + carry) >> 23) - top).clamp(min=1)
    scale = torch.where(largest == _INFINITY, _NAN, scale)
    inverse = torch.where(scale == _NAN, 0, 254 - scale).to(torch.int32) << 23
    scaled = rows * inverse.view(torch.float32)[:, None]
    codes = (scaled.round() if wire == "int8" else scaled).to(kind)
    out[: blocks * WIRE_BLOCK] = codes.view(torch.uint8).view(-1)
    out[blocks * WIRE_BLOCK :] = scale


def decode(coded: Any, count: int, wire: str) -> Any:
    """The first `count` elements of what `encode` has made, as f32."""
    kind, _, _ = _FORMATS[wire]
    blocks = coded.numel() // (WIRE_BLOCK + 1)
    codes, scale = coded[: blocks * WIRE_BLOCK], coded[blocks * WIRE_BLOCK :].to(torch.int32)
    step = torch.where(scale == _NAN, _QUIET_NAN, scale << 23).to(torch.int32).view(torch.float32)
    rows = codes.view(kind).to(torch.float32).view(blocks, WIRE_BLOCK) * step[:, None]
    return rows.view(-1)[:count]
