"""Tests' view of libfabric: whether it has a provider here, and the environment of ranks on it."""

from __future__ import annotations

from functools import cache

from unisono.bench.cases import CaseError
from unisono.bench.fabric import look_up


@cache
def missing(provider: str) -> str | None:
    """Returns why there is no such provider, or None. Another process asks: libfabric in this one would keep
    a later MPI from starting."""
    try:
        look_up(provider)
    except CaseError as error:
        return str(error)
    return None


def between_nodes() -> dict[str, str]:
    """Returns the environment of ranks whose nodes the fabric joins, where it can. Otherwise `unisono run`
    takes gloo, for which every rank imports torch: that takes seconds of a core."""
    return {} if missing("tcp") else {"UNISONO_TRANSPORT": "fabric"}


def over(provider: str, **more: str) -> dict[str, str]:
    """Returns the environment of ranks whose communicators are on the fabric lane."""
    return {"UNISONO_LANE": "fabric", "UNISONO_FABRIC_PROVIDER": provider, **more}
