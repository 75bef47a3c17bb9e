"""Ranks that share one GPU, a stream each, and the time of their calls in CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import unisono

SMS = 128  # of a Hopper GPU's 132: all ranks' blocks are resident at once
Call = Callable[[int], Any]  # of a rank, on its stream


def prepare(shared: bool = True) -> None:
    """Sets what ranks of one GPU need, before CUDA starts. shared: there are several."""
    # ranks that share a queue would wait for each other, as would a kernel that is loaded late
    os.environ.update(
        UNISONO_SHARE_DEVICE=str(int(shared)), CUDA_DEVICE_MAX_CONNECTIONS="32", CUDA_MODULE_LOADING="EAGER"
    )


class Ranks:
    def __init__(self, n: int) -> None:
        self.comms = unisono.init_all([0] * n, max_sms=SMS // n if n > 1 else 0, check=False)
        self.streams = [torch.cuda.Stream() for _ in range(n)]
        self.events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        self.words = [torch.zeros(2, device="cuda") for _ in range(n)]

    def meet(self, rank: int) -> None:
        self.comms[rank].all_reduce(self.words[rank][:1], out=self.words[rank][1:])

    def run(self, call: Call) -> list[Any]:
        torch.cuda.synchronize()
        results = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                results.append(call(rank))
        self.wait()
        return results

    def wait(self) -> None:
        for comm, stream in zip(self.comms, self.streams, strict=True):
            comm.synchronize(stream)

    def capture(self, call: Call, calls: int) -> list[torch.cuda.CUDAGraph]:
        graphs = [torch.cuda.CUDAGraph() for _ in self.streams]
        for rank, (graph, stream) in enumerate(zip(graphs, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                for _ in range(calls):
                    call(rank)
                graph.capture_end()
        return graphs

    def replay(self, graphs: list[torch.cuda.CUDAGraph]) -> float:
        """Returns the microseconds of the slowest rank. A kernel holds all until each has been started."""
        torch.cuda._sleep(2_000_000)  # cycles
        gate = torch.cuda.current_stream().record_event()
        for graph, stream, (begin, end) in zip(graphs, self.streams, self.events, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(gate)
                begin.record()
                graph.replay()
                end.record()
        self.wait()
        return 1e3 * max(begin.elapsed_time(end) for begin, end in self.events)
