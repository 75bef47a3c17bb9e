"""Making communicators: where am I, how do we meet, and which plan is there for this machine."""

from __future__ import annotations

import atexit
import json
import math
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import bootstrap as bootstraps
from . import launch
from ._core import Communicator, thread_bootstraps
from .errors import UsageError

_DEFAULT_TIMEOUT_S = 30.0
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A rank that exits in good order is not taken for one that died."""
    for communicator in list(_open):
        communicator.close()


def init(
    rank: int | None = None,
    size: int | None = None,
    bootstrap: Any = None,
    timeout_s: float | None = None,
    check: bool | None = None,
) -> Communicator:
    """The communicator of all ranks that were started together. Collective.

    Without arguments it finds where it is: `unisono run`, torchrun, Open MPI, MPICH or another PMI launcher,
    a Slurm step, or a process alone (one rank).

    rank, size: instead of what the environment says; then `bootstrap` must be given unless size is 1.
    bootstrap: an mpi4py communicator, a torch.distributed Store, or an object with rank, size and
        all_gather(bytes) -> list[bytes]; None: the launcher's own.
    timeout_s: deadline of every wait in seconds; None: UNISONO_TIMEOUT_S, else 30.
    check: compare the ranks' calls before anything moves; None: UNISONO_CHECK, else no.

    Raises UsageError where the environment or the arguments make no sense, TimeoutError when ranks do not
    come, ResourceError when memory cannot be shared.
    """
    if (rank is None) != (size is None):
        raise UsageError("rank and size go together: give both, or neither.")
    if rank is not None and size is not None:
        world = launch.World(rank, size, rank, size, "explicit")
    else:
        world = launch.from_env(os.environ)
    wait_s = _deadline_s(timeout_s)
    meeting = bootstraps.make(world, bootstrap, wait_s)
    communicator = Communicator(meeting, timeout_s, check)
    _open.add(communicator)
    _load_plan(communicator)
    return communicator


def init_threads(n: int, timeout_s: float | None = None, check: bool | None = None) -> list[Communicator]:
    """`n` communicators, one for each of `n` threads of this process; element r is rank r's.

    Calls release the GIL. Every buffer is within every rank's reach, so that all large calls are zero-copy.
    timeout_s and check as in `init`.
    """
    wait_s = _deadline_s(timeout_s)
    meetings = thread_bootstraps(n, wait_s)
    with ThreadPoolExecutor(n) as pool:
        communicators = list(pool.map(lambda meeting: Communicator(meeting, timeout_s, check), meetings))
    _open.update(communicators)
    for communicator in communicators:
        _load_plan(communicator)
    return communicators


def _deadline_s(timeout_s: float | None) -> float:
    name = "timeout_s"
    if timeout_s is None:
        name = "UNISONO_TIMEOUT_S"
        text = os.environ.get(name) or str(_DEFAULT_TIMEOUT_S)
        try:
            timeout_s = float(text)
        except ValueError:
            raise UsageError(
                f"{name}={text} is not a number: set it to seconds above 0, or unset it."
            ) from None
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(f"{name}={timeout_s:g} is no deadline: give seconds above 0.")
    return timeout_s


def plan_path() -> Path:
    """Where the plan table lies: UNISONO_PLAN, else the user's cache (`unisono tune` writes it)."""
    if named := os.environ.get("UNISONO_PLAN"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "unisono" / "plan.json"


def _load_plan(communicator: Communicator) -> None:
    path = plan_path()
    if not path.is_file():
        if named := os.environ.get("UNISONO_PLAN"):
            raise UsageError(
                f"UNISONO_PLAN={named} is not a file: write it with `unisono tune`, or unset it."
            )
        return
    try:
        tables = json.loads(path.read_text())
        entries = [
            (entry["collective"], entry["memory"] == "symmetric", entry["up_to_bytes"], entry["algorithm"])
            for table in (tables if isinstance(tables, list) else [tables])
            if table["ranks"] == communicator.size
            for entry in table["entries"]
        ]
        communicator.set_plan(entries)
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UsageError(
            f"{path} is not a plan table ({why}): write it again with `unisono tune`."
        ) from error
