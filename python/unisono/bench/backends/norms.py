"""all_reduce_rms_norm by each library: Unisono's one call; an all_reduce, then torch or numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from unisono.bench.backends.base import Buffers, ResultCall
from unisono.bench.norm import BLOCK, EPS, arrays
from unisono.records import Case
from unisono.records.vocabulary import QUANTS

APART = "apart"  # an all_reduce, then the rest on every rank
ALGORITHMS = {
    "cpu": ("one_shot", "two_shot", APART),
    "cuda": ("one_shot", "one_shot_ll128", "two_shot", "two_shot_ll128", APART),
}


def by_unisono(
    comm: Any, case: Case, buffers: Buffers, algorithm: str | None, queued: Mapping[str, Any]
) -> Callable[[], object]:
    """Returns Unisono's call. queued: further arguments of a call on a GPU."""
    import unisono

    found = arrays(case, buffers.x, buffers.out)
    options = unisono.NormOptions(
        out=found.out,
        residual_out=found.residual_out,
        quant=None if found.scales is None else QUANTS[1],
        scales_out=found.scales,
        algorithm=algorithm,
    )
    arguments = found.x, found.residual, found.weight, EPS
    return partial(comm.all_reduce_rms_norm, *arguments, options=options, **queued)


def by_torch(
    case: Case,
    buffers: Buffers,
    tensor: Callable[[Any, Case], Any],
    all_reduce: Callable[[Any], Callable[[], object]],
) -> ResultCall:
    """Returns an all_reduce that works in place, add_ and torch's rms_norm. The copy that keeps x is part of
    the call. `tensor` returns an array of a case as a flat tensor on the same memory, `all_reduce` a call
    that sums a tensor."""
    import torch

    found = arrays(case, buffers.x, buffers.out)
    rows, hidden = found.x.shape
    x, residual, weight, joined = (
        tensor(array, case) for array in (found.x, found.residual, found.weight, found.residual_out)
    )
    joined_rows, norm, summed = joined.view(rows, hidden), torch.nn.functional.rms_norm, all_reduce(joined)
    last: Any = None

    def call() -> None:
        nonlocal last
        joined.copy_(x)
        summed()
        joined.add_(residual)
        last = norm(joined_rows, (hidden,), weight, EPS)

    def call_quantised() -> None:
        nonlocal last
        call()
        blocks = last.float().view(rows, -1, BLOCK)
        scales = blocks.abs().amax(2, keepdim=True).clamp_(min=1e-4).div_(448)
        last = (blocks / scales).to(torch.float8_e4m3fn), scales

    def keep() -> None:
        """Copies the last results into the output, for the checks."""
        if found.scales is None:
            tensor(found.out, case).copy_(last.view(-1))
        else:
            codes, scales = last
            np.copyto(found.out.view(np.uint8), codes.view(torch.uint8).numpy().reshape(rows, hidden))
            np.copyto(found.scales, scales.numpy().reshape(rows, -1))

    return ResultCall(call if found.scales is None else call_quantised, keep)


def by_numpy(
    case: Case, buffers: Buffers, all_reduce: Callable[[Case, Any, Any], Callable[[], object]]
) -> Callable[[], object]:
    """Returns an all_reduce, then numpy's operations, in memory made beforehand. `all_reduce` returns a call
    that sums one array into another."""
    found = arrays(case, buffers.x, buffers.out)
    joined, out, hidden = found.residual_out, found.out, found.x.shape[1]
    squares, summed = np.empty(len(joined), joined.dtype), all_reduce(case, found.x, joined)

    def call() -> None:
        summed()
        np.add(joined, found.residual, out=joined)
        np.einsum("rh,rh->r", joined, joined, out=squares)
        factor = 1 / np.sqrt(squares / hidden + np.float32(EPS))
        np.multiply(joined, factor[:, None], out=out)
        np.multiply(out, found.weight, out=out)

    return call
