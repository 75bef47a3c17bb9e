"""A transformer block, cut among the ranks: what follows each all_reduce, apart and within one call.

unisono run -n 2 examples/10_tensor_parallel.py
"""

import numpy as np

import unisono

TOKENS, HIDDEN, HEADS, INNER, EPS = 12, 64, 12, 96, 1e-6
WIDTH = HIDDEN // 4  # of a head
Array = np.ndarray


def randn(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / np.float32(8)


def attention(x: Array, heads: range) -> Array:
    """Returns this rank's heads' part of the sum."""
    part = np.zeros_like(x)
    for head in heads:
        q, k, v = (x @ randn(HIDDEN, WIDTH, seed=4 * head + i) for i in range(3))
        weights = np.exp(q @ k.T)
        part += weights / weights.sum(1, keepdims=True) @ v @ randn(WIDTH, HIDDEN, seed=4 * head + 3)
    return part


def feed_forward(x: Array, columns: slice) -> Array:
    """Returns this rank's columns' part of the sum."""
    up, down = randn(HIDDEN, INNER, seed=1000), randn(INNER, HIDDEN, seed=1001)
    return np.maximum(x @ up[:, columns], 0) @ down[columns]


def block(comm: unisono.Communicator, x: Array, residual: Array, fused: bool) -> tuple[Array, Array]:
    """Returns the block's result, normalised for the next block, and the residual."""

    def tail(part: Array, residual: Array, weight: Array) -> tuple[Array, Array]:
        if fused:
            return comm.all_reduce_rms_norm(part, residual, weight, EPS)
        residual = comm.all_reduce(part) + residual
        return rms_norm(residual, weight), residual

    share = lambda count: range(comm.rank * count // comm.size, (comm.rank + 1) * count // comm.size)  # noqa: E731
    columns = share(INNER)
    x, residual = tail(attention(x, share(HEADS)), residual, randn(HIDDEN, seed=1002))
    return tail(feed_forward(x, slice(columns.start, columns.stop)), residual, randn(HIDDEN, seed=1003))


def rms_norm(rows: Array, weight: Array) -> Array:
    """Returns each row divided by its root mean square. Halves are added, as in Unisono's own norm."""
    sums = rows * rows
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return rows * (1 / np.sqrt(sums / np.float32(HIDDEN) + np.float32(EPS))) * weight


with unisono.init() as comm:
    x = residual = randn(TOKENS, HIDDEN, seed=2000)
    apart, apart_residual = block(comm, x, residual, fused=False)
    fused, fused_residual = block(comm, x, residual, fused=True)
    assert np.array_equal(fused, apart) and np.array_equal(fused_residual, apart_residual)

    # the next matmul may take 8-bit floats: they and their scales come out of the same call
    options = unisono.NormOptions(quant="fp8_128")
    weight = np.ones(HIDDEN, np.float32)
    (codes, scales), _ = comm.all_reduce_rms_norm(
        fused / comm.size, fused_residual, weight, EPS, options=options
    )
    if comm.rank == 0:
        print(f"{comm.size} ranks: the same bits, apart and fused; then {codes.dtype}, scales {scales.shape}")
