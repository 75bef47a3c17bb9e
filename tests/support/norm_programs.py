"""The programs of ranks in test_norm.py, as in fault_programs.py."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np

import unisono
from fault_programs import FLOATS, Meeting, attempt, wait_for_end


def killed_inside(algorithm: str) -> dict[str, Any]:
    """Kills rank 1 while it waits inside a fused norm. The last rank comes after the death. symmetric: by the
    plan, on memory that the ranks share."""
    comm = unisono.init(timeout_s=30)
    meeting = Meeting()
    weight = np.ones(64, FLOATS)
    if algorithm == "symmetric":
        x, out = (comm.empty((1024, 64), FLOATS) for _ in range(2))
        x[:] = 1
        options = unisono.NormOptions(residual_out=out)
    else:
        x, options = np.ones((8, 64), FLOATS), unisono.NormOptions(algorithm=algorithm)

    def call() -> None:
        comm.all_reduce_rms_norm(x, x, weight, options=options)

    call()
    pids = meeting.tell(os.getpid())
    if comm.rank == 1:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        call()
        call()
    died = wait_for_end(pids[1]) if comm.rank == comm.size - 1 else None

    def until_it_fails() -> None:
        for _ in range(3):
            call()

    first = attempt(until_it_fails)
    again = [attempt(comm.barrier), attempt(call)]
    comm.close()
    return {"victim": pids[1], "died": died, "first": first, "again": again}
