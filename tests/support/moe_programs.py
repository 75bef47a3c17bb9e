"""The programs of ranks in test_moe_faults.py, as in fault_programs.py."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np

import unisono
from fault_programs import FLOATS, Meeting, attempt, wait_for_end


def killed_inside(phase: str) -> dict[str, Any]:
    """Kills rank 1 while it waits inside a dispatch or a combine. The last rank comes after the death."""
    comm = unisono.init(timeout_s=30)
    meeting = Meeting()
    moe = comm.moe(comm.size, comm.size, 64, 8, "float32")
    x = np.ones((8, 64), FLOATS)
    idx = np.tile(np.arange(comm.size), (8, 1))
    d = moe.dispatch(x, idx)
    moe.combine(d.x, d.handle)
    pids = meeting.tell(os.getpid())

    def until_it_fails() -> None:  # the victim may have done its whole part of the first call
        for _ in range(3):
            if phase == "dispatch":
                moe.dispatch(x, idx)
            else:
                moe.combine(d.x, d.handle)

    if comm.rank == 1:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        until_it_fails()
    died = wait_for_end(pids[1]) if comm.rank == comm.size - 1 else None
    first = attempt(until_it_fails)
    again = [attempt(comm.barrier), attempt(lambda: moe.dispatch(x, idx))]
    comm.close()
    return {"victim": pids[1], "died": died, "first": first, "again": again}


def killed_between(phase: str) -> dict[str, Any]:
    """Kills rank 1 between the begin and the end of a dispatch or a combine."""
    comm = unisono.init(timeout_s=30)
    meeting = Meeting()
    moe = comm.moe(comm.size, comm.size, 64, 8, "float32")
    x = np.ones((8, 64), FLOATS)
    idx = np.tile(np.arange(comm.size), (8, 1))
    d = moe.dispatch(x, idx)
    pids = meeting.tell(os.getpid())
    if phase == "dispatch":
        moe.dispatch_begin(x, idx)
    else:
        moe.combine_begin(d.x, d.handle)
    meeting.tell()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    died = wait_for_end(pids[1])

    def until_it_fails() -> None:  # its messages may all have come
        (moe.dispatch_end if phase == "dispatch" else moe.combine_end)()
        moe.dispatch(x, idx)

    first = attempt(until_it_fails)
    again = [attempt(comm.barrier), attempt(lambda: moe.dispatch(x, idx))]
    comm.close()
    return {"victim": pids[1], "died": died, "first": first, "again": again}
