"""One rank of tools/gpu-sanitize.sh: makes the calls of one area, small. Exits with 1 if a result was wrong.

python gpu_sanitized.py [collectives|norms|experts|matmuls ...]
"""

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

import unisono
import unisono.torch as ut
from gpu_programs import Rank, collectives, messages

AREAS = ("collectives", "norms", "experts", "matmuls")
ALGORITHMS = (None, "one_shot", "one_shot_ll128", "two_shot", "two_shot_ll128")
HIDDEN = 1152  # neither a power of two nor what one block holds


def norms() -> Iterator[tuple[str, bool]]:
    """Makes all_reduce_rms_norm by every algorithm, plain and quantised."""
    ranks = Rank()
    torch.manual_seed(0)
    known = [name for name in ALGORITHMS if ranks.comm.nvlink or not str(name).endswith("ll128")]
    for rows, algorithm in product((3, 40), known):
        xs = torch.randn(ranks.size, rows, HIDDEN, device="cuda").bfloat16()
        residual, weight = torch.randn_like(xs[0]), torch.randn_like(xs[0, 0])
        total = xs.float().sum(0).bfloat16() + residual
        wanted = torch.nn.functional.rms_norm(total, (HIDDEN,), weight, 1e-6)
        for quant in (None, "fp8_token", "fp8_128", "mx"):
            how = unisono.NormOptions(algorithm=algorithm, quant=quant)
            out, joined = ranks.comm.all_reduce_rms_norm(xs[ranks.rank], residual, weight, options=how)
            ranks.wait()
            right = torch.allclose(joined.float(), total.float(), rtol=0.02, atol=0.02)
            if quant is None:
                right = right and torch.allclose(out.float(), wanted.float(), rtol=0.03, atol=0.03)
            yield f"{rows} rows, {algorithm}, {quant}", right


def experts() -> Iterator[tuple[str, bool]]:
    """Dispatches by each form, with each scale, and combines what the experts would give."""
    ranks = Rank()
    torch.manual_seed(ranks.rank)
    forms = product(("flat", "rank_major", "expert_major"), (None, "e4m3_128", "mx"), (5, 300, 600))
    for layout, scales, tokens in forms:
        options = unisono.MoeOptions(layout=layout, scales=scales)
        moe = ranks.comm.moe(8 * ranks.size, 4, HIDDEN, tokens, dtype="bf16", options=options)
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        topk_idx = torch.rand(tokens, 8 * ranks.size, device="cuda").topk(4).indices.int()
        weights = torch.full((tokens, 4), 0.25, device="cuda")
        for _ in range(2):
            came = moe.dispatch(x, topk_idx, weights)
            rows = torch.ones(came.x.shape, device="cuda", dtype=torch.bfloat16)
            out = moe.combine(rows, came.handle)
            ranks.wait()
            homes = [idx.div(8, rounding_mode="floor").unique().numel() for idx in topk_idx.cpu()]
            wanted = torch.tensor(homes if layout != "expert_major" else [1] * tokens, device="cuda")
            yield f"{layout}, {scales}, {tokens} tokens", bool((out.float() == wanted[:, None]).all())


def matmuls() -> Iterator[tuple[str, bool]]:
    """Makes each fused matmul of two chunks a rank, with even shares and uneven ones."""
    ranks = Rank()
    torch.manual_seed(0)
    comm, n = ranks.comm, ranks.size
    for rows in (64 * n, 64 * n - 3):
        a = torch.randn(n, rows, 128, device="cuda").bfloat16()
        b = torch.randn(128, 192, device="cuda").bfloat16()
        block = -(-rows // n)
        mine = slice(block * ranks.rank, min(block * (ranks.rank + 1), rows))
        products = (a.float() @ b.float()).bfloat16().float()
        for _ in range(2):
            _, (gathered,) = ut.fused_all_gather_matmul(comm, a[0, mine], [b], chunks=2 * n, gathered=rows)
            own = ut.fused_matmul_reduce_scatter(comm, a[ranks.rank], b, chunks=2 * n)
            total = ut.matmul_all_reduce(comm, a[ranks.rank], b, chunks=2 * n)
            ranks.wait()
            sums = products.sum(0)
            for name, got, wanted in (
                ("all_gather", gathered, products[0]),
                ("reduce_scatter", own, sums[mine]),
                ("all_reduce", total, sums),
            ):
                yield f"{name}, {rows} rows", torch.allclose(got.float(), wanted, rtol=0.02, atol=0.3)


PARTS = {"norms": norms, "experts": experts, "matmuls": matmuls}


def made(area: str) -> dict[str, Any]:
    """Returns the number of calls and the wrong ones."""
    found = list(PARTS[area]())
    return {"made": len(found), "wrong": [what for what, right in found if not right]}


if __name__ == "__main__":
    areas = sys.argv[1:] or AREAS
    done: list[dict[str, Any]] = [made(area) for area in areas if area != "collectives"]
    if "collectives" in areas:
        done += [collectives(dtype, [1, 1000, 20_011]) for dtype in ("f32", "i8")]
        done.append(messages(20_011))
    wrong = [line for one in done for line in one["wrong"]]
    print(f"{sum(one['made'] for one in done)} calls, {len(wrong)} wrong", *wrong, sep="\n")
    sys.exit(bool(wrong))
