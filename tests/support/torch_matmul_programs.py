"""The programs of ranks in test_torch_matmul.py, as in fault_programs.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import unisono
import unisono.torch
from fault_programs import Meeting, attempt, wait_for_end


def killed_between_chunks() -> dict[str, Any]:
    """Kills rank 1 before the second chunk of a fused matmul."""
    comm = unisono.init(timeout_s=30)
    pids = Meeting().tell(os.getpid())
    a, b = torch.ones(6, 4), torch.ones(4, 8)

    def matmul(a: Any, b: Any, out: Any, chunk: Any) -> None:
        if comm.rank == 1 and chunk.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.mm(a, b, out=out)

    def fused() -> None:
        unisono.torch.fused_matmul_reduce_scatter(comm, a, b, chunks=3, matmul=matmul)

    first = attempt(lambda: [fused() for _ in range(2)])
    died = wait_for_end(pids[1]) if comm.rank == 2 else None
    again = [attempt(comm.barrier), attempt(fused)]
    comm.close()
    return {"victim": pids[1], "died": died, "first": first, "again": again}


def killed_on_gpu(call: str) -> dict[str, Any]:
    """Kills rank 1 before a fused matmul on GPUs, whose chunks wait for it on the stream."""
    from gpu_programs import Rank

    here = Rank(timeout_s=30, check=False)
    comm = here.comm
    a, b = (torch.ones(*s, dtype=torch.bfloat16, device="cuda") for s in ((512, 256), (256, 512)))
    norm = {"residual": a.new_ones(512, 512), "weight": a.new_ones(512)}

    def fused() -> None:
        if call == "all_gather":
            unisono.torch.fused_all_gather_matmul(comm, a, [b], chunks=2)
        else:
            unisono.torch.matmul_all_reduce(comm, a, b, chunks=2, **norm)

    def whole() -> None:
        fused()
        torch.cuda.current_stream().synchronize()
        here.wait()

    whole()
    pids = here.meeting.tell(os.getpid())
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    first = attempt(lambda: [whole() for _ in range(3)])
    died = wait_for_end(pids[1])
    again = [attempt(fused), attempt(comm.barrier)]
    comm.close()
    return {"victim": pids[1], "died": died, "first": first, "again": again}
