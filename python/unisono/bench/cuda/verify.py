"""The functions of `unisono.bench.verify` on torch tensors: make and compare data and sums on the device.

The random data comes from a counter and integer arithmetic alone (splitmix64: G. Steele et al., Fast
splittable pseudorandom number generators, 2014). Every rank therefore computes every other rank's block bit
for bit, on any GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from unisono.bench.cuda.memory import numpy_of, tensor_of, torch_dtype
from unisono.bench.verify import Arithmetic, Piece, rows
from unisono.records import Case
from unisono.records.vocabulary import INTEGERS

TILES = 8  # blocks of a row of a long piece; with more, temporaries need too much memory
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 1 << 64


def _signed(word: int) -> int:
    """Returns 64 bits as a value of torch's int64."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _mixed(word: int) -> int:
    """Returns splitmix64 of one word, as a word."""
    word = (word ^ (word >> 30)) * _FIRST % _WORD
    word = (word ^ (word >> 27)) * _SECOND % _WORD
    return word ^ (word >> 31)


def _shifted(bits: Any, by: int) -> Any:
    """Returns the bits shifted logically to the right, which torch has for no signed type."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def random_bits(seed: int, rank: int, count: int, device: str) -> Any:
    """Returns `count` int64 of random bits, the same on every device."""
    import torch

    start = _mixed((_mixed(seed % _WORD + _GOLDEN) + rank * _GOLDEN) % _WORD)
    bits = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    bits += _signed(start)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_SECOND)
    return bits ^ _shifted(bits, 31)


def random_block(case: Case, rank: int, seed: int, count: int, device: str) -> Any:
    """Returns `count` values of the case's dtype. Integers: any bits, or small values for an average. Floats:
    magnitudes from 0.5 to 2, never zero; for a product from 0.75 to 1.25."""
    import torch

    bits = random_bits(seed, rank, count, device)
    if case.dtype in INTEGERS:
        if case.op == "avg":
            low, values = (0, 101) if case.dtype == "u8" else (-100, 201)
            return (_shifted(bits, 33) % values + low).to(torch_dtype(case.dtype))
        return bits.view(torch_dtype(case.dtype))[:count] if case.dtype != "i64" else bits
    mantissa, above, sign = bits & 0x7FFFFF, (bits >> 23) & 1, (bits >> 24) & 1
    if case.op == "prod":
        magnitude = 0.75 + mantissa.to(torch.float32) * (0.5 / (1 << 23))
        values = torch.where(sign == 0, magnitude, -magnitude)
    else:  # bits of an f32: sign, exponent of 0.5 or 1, mantissa
        word = (sign << 31) | ((126 + above) << 23) | mantissa
        values = word.to(torch.int32).view(torch.float32)
    return values.to(torch_dtype(case.dtype))


def combine(blocks: Sequence[Any], op: str, dtype: str) -> Any:
    """Returns the reduction, as verify.combine: in rank order, in the wide type, one rounding at the end."""
    import torch

    kind, n = torch_dtype(dtype), len(blocks)
    if dtype in INTEGERS:
        wide = torch.int64 if op == "avg" else kind
    else:
        wide = torch.float64 if dtype == "f64" else torch.float32
    total = blocks[0].to(wide)
    for block in blocks[1:]:
        other = block.to(wide)
        match op:
            case "sum" | "avg":
                total = total + other
            case "prod":
                total = total * other
            case "min":
                total = torch.where(other < total, other, total)
            case _:
                total = torch.where(other > total, other, total)
    if op == "avg":
        # Divides by a tensor: with a number, torch multiplies by the reciprocal, which rounds twice.
        by = torch.full((1,), n, dtype=wide, device=total.device)
        total = torch.div(total, by, rounding_mode="trunc") if dtype in INTEGERS else total / by
    return total.to(kind)


def _tiled(pieces: Iterable[Piece]) -> list[Piece]:
    """Returns the pieces, with repeated blocks in long ones: fewer and longer rows need fewer kernels."""
    return [
        dataclasses.replace(
            piece,
            block=piece.block.repeat(TILES),
            allowed=None if piece.allowed is None else tuple(part.repeat(TILES) for part in piece.allowed),
        )
        if piece.count >= 4 * TILES * len(piece.block)
        else piece
        for piece in pieces
    ]


def write(flat: Any, pieces: Sequence[Piece]) -> None:
    """Fills a flat tensor with the pieces."""
    for piece in _tiled(pieces):
        for start, at, length in rows(piece):
            flat[start : start + length].copy_(piece.block[at : at + length])


def differences(flat: Any, pieces: Iterable[Piece]) -> tuple[int, str | None]:
    """Compares, as verify.differences. Does not wait for each row; only a wrong row is looked at."""
    import torch

    found: list[tuple[Piece, int, int, int]] = []
    counts: list[Any] = []
    for piece in _tiled(pieces):
        for start, at, length in rows(piece):
            bad = _bad(flat[start : start + length], piece, at, length)
            counts.append(torch.count_nonzero(bad))
            found.append((piece, start, at, length))
    if not counts:
        return 0, None
    wrong = torch.stack(counts).tolist()
    total = int(sum(wrong))
    if total == 0:
        return 0, None
    piece, start, at, length = found[next(index for index, number in enumerate(wrong) if number)]
    got = flat[start : start + length]
    index = int(torch.nonzero(_bad(got, piece, at, length))[0])
    want = piece.block[at + index]
    return total, f"element {start + index} is {_value(got[index])}, expected {_value(want)}"


def _value(element: Any) -> str:
    """Returns an element as numpy would print it."""
    value = element.to("cpu").to(dtype=_printable(element)).item()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _printable(element: Any) -> Any:
    import torch

    return torch.float64 if element.dtype.is_floating_point else torch.int64


def _bad(got: Any, piece: Piece, at: int, length: int) -> Any:
    """Returns which elements of a row are wrong. NaN equals NaN."""
    import torch

    want = piece.block[at : at + length]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    bad = got.view(bits) != want.view(bits)
    if not got.dtype.is_floating_point:
        return bad
    if piece.allowed is not None:
        exact, bound = (part[at : at + length] for part in piece.allowed)
        wide = got.to(torch.float64)
        bad &= ~((wide - exact).abs() <= bound)  # NaN is out of bounds
    narrow = got if got.dtype == torch.float64 else got.to(torch.float32)
    wanted = want if want.dtype == torch.float64 else want.to(torch.float32)
    return bad & ~(torch.isnan(narrow) & torch.isnan(wanted))


def arithmetic(device: str) -> Arithmetic:
    """Returns the functions of this module for `unisono.bench.verify`, with data made on `device`."""

    def block(case: Case, rank: int, seed: int, count: int) -> Any:
        return random_block(case, rank, seed, count, device)

    def cast(block: Any, dtype: str) -> Any:
        return block.to(torch_dtype(dtype))

    asarray = partial(tensor_of, device=device)
    return Arithmetic(block, combine, write, differences, cast, asarray, numpy_of)
