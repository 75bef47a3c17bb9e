"""The contract of mixture of experts, with every lane and number of ranks, compared with numpy bit by bit.

One body with its matrix (moe_body.py, moe_cases.py), one reference (moe_reference.py), run by groups.py.
"""

from __future__ import annotations

import pytest

from groups import MODES, judge
from moe_cases import GROUPS

# More nodes than the norms have: a token crosses once for each node, by every transport.
BY_OTHERS = [
    *(pytest.param("nodes by mpi", layout, marks=pytest.mark.mpi) for layout in ("aabb", "aab", "aabbcc")),
    pytest.param("nodes by gloo", "abb", marks=pytest.mark.torch),
]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("lane", "which"), [*MODES, *BY_OTHERS])
def test_moe_contract(lane: str, which: int | str, group: str) -> None:
    judge("moe", lane, which, group)
