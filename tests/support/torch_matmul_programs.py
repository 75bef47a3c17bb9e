"""The programs of ranks in test_torch_matmul.py, as in fault_programs.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import unisono
import unisono.torch
from fault_programs import Meeting, attempt, wait_for_end


def killed_between_chunks(call: str) -> dict[str, Any]:
    """Kills rank 1 before the second chunk of a fused matmul."""
    comm = unisono.init(timeout_s=30)
    pids = Meeting().tell(os.getpid())
    a, b = torch.ones(6, 4), torch.ones(4, 8)

    def matmul(a: Any, b: Any, out: Any, chunk: Any) -> None:
        if comm.rank == 1 and chunk.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.mm(a, b, out=out)

    def fused() -> None:
        if call == "all_gather":
            unisono.torch.fused_all_gather_matmul(comm, a, [b], chunks=3, matmul=matmul)
        else:
            unisono.torch.fused_matmul_reduce_scatter(comm, a, b, chunks=3, matmul=matmul)

    first = attempt(lambda: [fused() for _ in range(2)])
    died = wait_for_end(pids[1]) if comm.rank == 2 else None
    again = [attempt(comm.barrier), attempt(fused)]
    comm.close()
    return {"victim": pids[1], "died": died, "first": first, "again": again}
