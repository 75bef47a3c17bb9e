"""The contract of the fused norms, with every lane and number of ranks, compared with numpy bit by bit.

One body with its matrix (norm_body.py), one reference (norm_reference.py), run by groups.py.
"""

from __future__ import annotations

import pytest

from groups import MODES, judge
from norm_body import GROUPS


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("lane", "which"), MODES)
def test_norm_contract(lane: str, which: int | str, group: str) -> None:
    judge("norm", lane, which, group)
