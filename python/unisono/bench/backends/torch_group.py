"""torch's default process group, over gloo on loopback, and groups beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from unisono.bench.backends.base import Ranks
from unisono.gloo import INTERFACE_VARIABLE, make_store

TIMEOUT = timedelta(seconds=120)
_users = 0


def lacking() -> str | None:
    """Returns why there can be no such group, or no symmetric memory of torch's, or None."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "this build of torch has no torch.distributed with gloo: install one from PyPI."
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError as error:
        return f"this torch has no symmetric memory ({error}): install 2.6 or newer."
    return None


def join(ranks: Ranks) -> None:
    """Makes the group unless another backend has. Collective."""
    global _users  # noqa: PLW0603
    import torch.distributed as dist

    if not dist.is_initialized():
        store = make_store(ranks.rank, ranks.all_gather, TIMEOUT)
        with _loopback():
            dist.init_process_group(
                "gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=TIMEOUT
            )
    _users += 1


def name() -> str:
    """Returns the group's name, as torch.ops.symm_mem takes it."""
    import torch.distributed as dist

    return str(dist.group.WORLD.group_name)


def new_group(ranks: Ranks, backend: str) -> Any:
    """Returns another group of all ranks, with torch's `backend`. Collective. Its end is a `leave`."""
    import torch.distributed as dist

    join(ranks)
    try:
        with _loopback():
            return dist.new_group(backend=backend, timeout=TIMEOUT)
    except BaseException:
        leave()
        raise


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Lets gloo connect over loopback, unless the user has named an interface."""
    named = INTERFACE_VARIABLE in os.environ
    os.environ.setdefault(INTERFACE_VARIABLE, "lo")
    try:
        yield
    finally:
        if not named:  # the records list the user's variables only
            del os.environ[INTERFACE_VARIABLE]


def leave() -> None:
    """Ends the group with its last user. Requires: a `join` or `new_group` for each call."""
    global _users  # noqa: PLW0603
    import torch.distributed as dist

    _users -= 1
    if _users == 0:
        with contextlib.suppress(Exception):  # the other ranks may be gone already
            dist.destroy_process_group()
