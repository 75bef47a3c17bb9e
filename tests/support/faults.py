"""Checks for tests of lost, late and dissenting ranks: what the others must report."""

from __future__ import annotations

from typing import Any

import ranks

NOTICED_S = 5.0  # within this time the others name a rank that dies


def error_of(tried: dict[str, Any]) -> dict[str, Any]:
    assert "error" in tried, f"the call came back as if nothing had happened: {tried}"
    return dict(tried["error"])


def assert_lost(outcome: ranks.Outcome, victim: int, words: str = " has died", stuck: int = 0) -> None:
    """Checks that every other rank, except `stuck` ranks, got a PeerLostError that names the victim, in time,
    and gets the error again. words: the text after the name.
    """
    results = [r["result"] for rank, r in enumerate(outcome.ranks) if rank != victim and r is not None]
    assert len(results) == len(outcome.ranks) - 1 - stuck, str(outcome.ended)
    died = next((one["died"] for one in results if one["died"] is not None), None)
    assert died is not None or stuck, "no rank has seen when the victim died"
    for one in results:
        error = error_of(one["first"])
        assert error["type"] == "PeerLostError", error
        assert "ConnectionError" in error["bases"]
        assert f"rank {victim} (process {one['victim']}){words}" in error["text"], error["text"]
        assert died is None or one["first"]["at"] - died < NOTICED_S
        for again in one.get("again", []):
            assert error_of(again) == error


def assert_nothing_left(outcome: ranks.Outcome, marker: str) -> None:
    assert outcome.ended.code is not None, str(outcome.ended)
    assert ranks.processes_with(marker) == set()
    left = ranks.left_in_shared_memory(marker)
    assert left == set(), left
