#!/usr/bin/env python3
"""Measures mixture of experts on one GPU: permutation to expert order and the weighted sum back.

A rank alone, whose dispatch is a permutation and whose combine its inverse, beside torch (argsort,
index_select, index_add_), moe-ops and Transformer Engine's Triton kernels. Those two come from --peers, a
folder that holds their unpacked wheels:
  pip download --no-deps -d W moe-ops==0.1.0 transformer_engine==2.20.2
  for w in W/*.whl; do unzip -qo $w -d PEERS; done
Every result is checked against torch first. Times are of the GPU, of one call in a CUDA graph, the median of
--samples. Prints a table, and with --json the samples.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Calls = tuple[Callable[[], Any], Callable[[], Any]]  # permute, unpermute


def transformer_engine(peers: Path) -> Any:
    """Returns TE's module of Triton permutations, loaded by path: the package itself needs its libraries."""
    root = peers / "transformer_engine"
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.common.triton"):
        sys.modules.setdefault(name, types.ModuleType(name))
    for name, path in (
        ("transformer_engine.common.triton.permutation", root / "common/triton/permutation.py"),
        ("te_permutation", root / "pytorch/triton/permutation.py"),
    ):
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules["te_permutation"]


class Case:
    """Tokens and routes by seed, and what a permutation and its inverse must give."""

    def __init__(self, tokens: int, hidden: int, experts: int, top_k: int) -> None:
        torch.manual_seed(1)
        on: dict[str, Any] = {"device": "cuda"}
        self.tokens, self.hidden, self.experts, self.top_k = tokens, hidden, experts, top_k
        self.x = torch.randn(tokens, hidden, dtype=torch.bfloat16, **on)
        self.idx = torch.rand(tokens, experts, **on).topk(top_k).indices
        self.weights = torch.rand(tokens, top_k, **on).softmax(1)
        self.order = torch.argsort(self.idx.view(-1), stable=True)
        self.rows = self.x[self.order // top_k]
        self.sum = (self.weights.sum(1, keepdim=True) * self.x.float()).bfloat16()

    def of_torch(self) -> Calls:
        rows, wide = torch.empty_like(self.rows), torch.empty(self.tokens, self.hidden, device="cuda")
        kept: dict[str, torch.Tensor] = {}

        def permute() -> torch.Tensor:
            order = torch.argsort(self.idx.view(-1), stable=True)
            kept["token"], kept["weight"] = order // self.top_k, self.weights.view(-1)[order]
            return torch.index_select(self.x, 0, kept["token"], out=rows)

        def unpermute() -> torch.Tensor:
            return wide.zero_().index_add_(0, kept["token"], rows * kept["weight"][:, None]).bfloat16()

        return permute, unpermute

    def of_unisono(self) -> Calls:
        import unisono

        comm = unisono.init(device=0)
        options = unisono.MoeOptions(layout="expert_major", device="cuda")
        moe = comm.moe(self.experts, self.top_k, self.hidden, self.tokens, options=options)
        out, kept = torch.empty_like(self.x), {}

        def permute() -> torch.Tensor:
            kept["d"] = moe.dispatch(self.x, self.idx, self.weights)
            return kept["d"].x[: len(self.rows)]

        def unpermute() -> torch.Tensor:
            moe.combine(kept["d"].x, kept["d"].handle, out=out)
            return out

        return permute, unpermute

    def of_moe_ops(self) -> Calls:
        from moe_ops import permute, unpermute

        kept: dict[str, torch.Tensor] = {}
        idx = self.idx.int()

        def forward() -> torch.Tensor:
            kept["rows"], kept["map"], _ = permute(self.x, idx, E=self.experts)
            return kept["rows"]

        return forward, lambda: unpermute(kept["rows"], kept["map"], self.weights, self.tokens, self.top_k)

    def of_transformer_engine(self, peers: Path) -> Calls:
        te, kept = transformer_engine(peers), {}
        chosen = torch.zeros(self.tokens, self.experts, dtype=torch.int32, device="cuda")
        chosen.scatter_(1, self.idx, 1)
        weights = torch.zeros(self.tokens, self.experts, device="cuda").scatter_(1, self.idx, self.weights)
        shape = self.tokens, self.experts

        def permute() -> torch.Tensor:
            kept["map"] = te.make_row_id_map(chosen, *shape)
            rows, width = self.tokens * self.top_k, self.hidden
            kept["rows"] = te.permute_with_mask_map(
                self.x, kept["map"], None, None, None, *shape, rows, width, 0
            )[0]
            return kept["rows"]

        def unpermute() -> torch.Tensor:
            return te.unpermute_with_mask_map(
                kept["rows"], kept["map"], weights, None, None, *shape, self.hidden
            )[0]

        return permute, unpermute


def timed(call: Callable[[], Any], samples: int) -> list[float]:
    """Returns the microseconds of each sample."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    found = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return found


def check(case: Case, name: str, calls: Calls) -> None:
    """Raises if a permutation or its inverse is wrong. moe-ops gives the rows of an expert in any order."""
    rows, total = calls[0](), calls[1]()
    if name != "moe-ops" and not torch.equal(rows, case.rows):
        raise SystemExit(f"{name}: the permuted rows are wrong.")
    if not torch.allclose(total.float(), case.sum.float(), rtol=0.03, atol=0.03):
        raise SystemExit(f"{name}: the sums are wrong.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("tokens", 4096), ("hidden", 7168), ("experts", 256), ("top-k", 8), ("samples", 50)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peers", type=Path, help="folder of unpacked wheels")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    case = Case(asked.tokens, asked.hidden, asked.experts, asked.top_k)
    makers: dict[str, Callable[[], Calls]] = {"unisono": case.of_unisono, "torch": case.of_torch}
    if asked.peers is not None:
        sys.path.insert(0, str(asked.peers))
        makers["moe-ops"] = case.of_moe_ops
        makers["transformer-engine"] = lambda: case.of_transformer_engine(asked.peers)
    moved = (case.rows.nbytes + case.x.nbytes) / 1e3
    half = torch.empty(int(moved * 1e3) // 2, dtype=torch.uint8, device="cuda")
    other_half = torch.empty_like(half)
    copy = timed(lambda: other_half.copy_(half), asked.samples)
    results: dict[str, dict[str, list[float]]] = {"copy of as many bytes": {"copy": copy}}
    best = statistics.median(copy)
    shape = f"{asked.tokens} x {asked.hidden} bf16, top-{asked.top_k} of {asked.experts}"
    print(f"{torch.cuda.get_device_name()}: {shape}")
    print(f"{'':20}{'permute us':>12}{'of copy':>9}{'unpermute us':>14}{'of copy':>9}")
    print(f"{'copy':20}{best:12.1f}")
    for name, make in makers.items():
        try:
            calls = make()
            check(case, name, calls)
            found = [timed(call, asked.samples) for call in calls]
        except (ImportError, RuntimeError, OSError) as error:
            print(f"{name:20} left out: {error}")
            continue
        results[name] = dict(zip(("permute", "unpermute"), found, strict=True))
        one, other = map(statistics.median, found)
        print(f"{name:20}{one:12.1f}{best / one:9.0%}{other:14.1f}{best / other:9.0%}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(results))


main()
