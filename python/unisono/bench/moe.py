"""The cases of a mixture of experts.

moe_dispatch: from a rank's tokens and routes to the rows of its experts: expert_major by (expert, source
rank, token), or flat, a row for each token with an expert there, by (source rank, token). moe_combine: from a
result for each such row to the sum for each token, weighted if expert_major. moe_round: both, with the
received rows as the experts' results. Tokens, and the results for a combine, lie in memory that no library
owns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from unisono.bench import routes
from unisono.records import Case, Moe
from unisono.records.vocabulary import DTYPES, LAYOUTS, MOES, ROUTINGS

SEED = 1
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
EXPERTS, TOP_K = 256, 8  # of DeepSeek-V3
HIDDEN = 2048  # of DeepSeek-V2-Lite and Qwen3-30B-A3B; DeepSeek-V3 has 7168
MODE = "latency"


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """All that the user wants to measure. Cases are the product."""

    tokens: tuple[int, ...] = TOKENS
    hidden: tuple[int, ...] = (HIDDEN,)
    experts: int = EXPERTS
    top_k: tuple[int, ...] = (TOP_K,)
    routings: tuple[str, ...] = ROUTINGS[:1]
    layouts: tuple[str, ...] = LAYOUTS[:1]
    dtypes: tuple[str, ...] = ("bf16",)
    modes: tuple[str, ...] = (MODE,)
    device: str = "cpu"

    def problem(self, ranks: int) -> str | None:
        """Returns why this cannot run on `ranks` ranks, or None."""
        if self.experts % ranks:
            return f"--experts {self.experts}: {ranks} ranks cannot have as many each."
        if max(self.top_k) > self.experts:
            return f"--top-k {max(self.top_k)}: there are only {self.experts} experts."
        return None

    def cases(self, ranks: int, collectives: Sequence[str]) -> list[Case]:
        names = [name for name in collectives if name in MOES]
        product = itertools.product(
            names, self.layouts, self.routings, self.top_k, self.hidden, self.dtypes, self.modes, self.tokens
        )
        return [
            case(name, ranks, tokens, hidden, self.experts, top_k, dtype, routing, layout, mode, self.device)
            for name, layout, routing, top_k, hidden, dtype, mode, tokens in product
        ]


def case(
    collective: str,
    ranks: int,
    tokens: int,
    hidden: int,
    experts: int,
    top_k: int,
    dtype: str,
    routing: str = ROUTINGS[0],
    layout: str = LAYOUTS[0],
    mode: str = MODE,
    device: str = "cpu",
) -> Case:
    """Returns a case. Requires: `ranks` divides `experts`, and `top_k` is at most `experts`."""
    sent = routes.routes(ranks, tokens, experts, top_k, routing, SEED).sent
    unit = hidden * DTYPES[dtype].itemsize * (2 if collective == "moe_round" else 1)
    came = sent.sum(axis=0)
    moe = Moe(
        tokens=tokens,
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        routing=routing,
        layout=layout,
        seed=SEED,
        remote_bytes=int((came - sent.diagonal()).max()) * unit,
    )
    size = int(came.max()) * unit
    return Case(
        collective=collective,
        bytes=size,
        dtype=dtype,
        op=None,
        ranks=ranks,
        mode=mode,
        device=device,
        moe=moe,
    )
