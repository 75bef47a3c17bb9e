"""What tests of faults have in common."""

from __future__ import annotations

from typing import Any

import ranks

NOTICED_S = 5.0  # the promise: a rank that dies is named by the others within that time


def error_of(tried: dict[str, Any]) -> dict[str, Any]:
    assert "error" in tried, f"the call came back as if nothing had happened: {tried}"
    return dict(tried["error"])


def assert_nothing_left(outcome: ranks.Outcome, marker: str) -> None:
    assert outcome.ended.code is not None, str(outcome.ended)
    assert ranks.processes_with(marker) == set()
    assert ranks.files_in_shared_memory() == set()
