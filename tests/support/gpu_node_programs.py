"""The programs of ranks in tests/gpu/test_nodes.py: virtual nodes with GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import quantised
import unisono
from fault_programs import attempt
from gpus import devices_for
from node_programs import layout
from unisono.bench.backends.unisono import is_uniform
from unisono.bench.cuda.runtime import Graph, Runtime


def _joined(timeout_s: float, check: bool | None = None) -> Any:
    """Returns this rank's communicator. Ranks that share a GPU must seem to NCCL to be on different hosts."""
    world = unisono.launch.from_env(os.environ)
    devices, max_sms = devices_for(world.size)
    if len(set(devices)) < world.size:
        os.environ["NCCL_HOSTID"] = f"host of rank {world.rank}"
    torch.cuda.set_device(devices[world.rank])
    return unisono.init(timeout_s=timeout_s, device=devices[world.rank], max_sms=max_sms, check=check)


def streams(rounds: int) -> int:
    """Enqueues sums on three streams in turn, without a wait. Returns how many differ from the host's."""
    comm = _joined(60)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    made, pairs = torch.Generator().manual_seed(comm.rank), []
    for turn in range(rounds):
        host = torch.randn(1 + 40_000 * (turn % 5), generator=made)
        how = ("one_shot", "two_shot", "chain")[turn % 7 % 3]
        expected = comm.all_reduce(host, algorithm=how)
        x = host.cuda()
        torch.cuda.current_stream().synchronize()
        pairs.append((x, comm.all_reduce(x, algorithm=how, stream=streams[turn % 3]), expected))
    for stream in streams:
        comm.synchronize(stream)
    return sum(not torch.equal(got.cpu(), expected) for _, got, expected in pairs)


def one_is_late(timeout_s: float) -> dict[str, Any]:
    """Makes an all_reduce from which the last rank stays away until the others, which wait by CUDA, have
    given up."""
    comm = _joined(timeout_s)
    x = torch.ones(1 << 20, device="cuda")
    comm.all_reduce(x)
    comm.synchronize()
    if comm.rank == comm.size - 1:
        time.sleep(4 * timeout_s)
        return {}
    began = time.monotonic()
    attempt(lambda: comm.all_reduce(x))
    torch.cuda.synchronize()
    return {"waited": time.monotonic() - began, "next": attempt(lambda: comm.all_reduce(x))}


def closes_at_once() -> bool:
    """Returns whether a message of another node has come, although both ranks closed once it was enqueued."""
    comm = _joined(60)
    x = torch.full((1 << 26,), comm.rank, dtype=torch.uint8, device="cuda")
    peer = (comm.rank + 2) % 4
    out = comm.send_recv(x, peer, None, peer)
    comm.close()
    torch.cuda.synchronize()
    return bool((out == peer).all())


def like_the_host(nodes: str, dtype: str, counts: Sequence[int]) -> list[str]:
    """Makes the same calls on GPU and host arrays, on nodes as in `layout`. Returns those that differ."""
    layout(nodes)
    comm = _joined(60, check=True)
    kind, wrong = getattr(torch, dtype), []
    made = torch.Generator().manual_seed(comm.rank)
    for count in counts:
        stack = torch.randn(comm.size, count, generator=made) * 20
        stack = stack.to(kind if kind.is_floating_point else torch.int32).to(kind)
        for name, call in _calls(comm, kind).items():
            expected, got = call(stack), call(stack.cuda())
            comm.synchronize()
            wrong += [] if _same(got, expected) else [f"{name} of {count}"]
    return wrong


def graphs(nodes: str, by_torch: bool, count: int, replays: int) -> list[str]:
    """Replays captured calls on fresh data. Returns those whose bits differ, or that write to memory that is
    not theirs."""
    layout(nodes)
    comm, wrong = _joined(60), []
    made, stream = torch.Generator().manual_seed(comm.rank), torch.cuda.Stream()
    stack = torch.zeros(comm.size, count, device="cuda")
    for name, call in _calls(comm, stack.dtype).items():
        with torch.cuda.stream(stream):
            call(stack)  # NCCL makes its connections
            comm.synchronize(stream)
            replay, got = _captured(partial(call, stack), stream, by_torch)
            others = [torch.zeros(n * count, device="cuda") for n in (1, comm.size) for _ in range(8)]
            for _ in range(replays):
                fresh = torch.randn(comm.size, count, generator=made)
                expected = call(fresh)
                stack.copy_(fresh)
                replay()
                comm.synchronize(stream)
                wrong += [] if _same(got, expected) and _same(stack, fresh) else [name]
            wrong += [f"{name} elsewhere" for other in others if bool(other.any())]
    return wrong


def _captured(call: Callable[[], Any], stream: Any, by_torch: bool) -> tuple[Callable[[], object], Any]:
    """Returns a function that runs the captured call, and the call's result. Memory that torch allocates
    during CUDA's own capture, unlike torch's, goes to the next allocation."""
    results: list[Any] = []
    if by_torch:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results.append(call())
        return graph.replay, results[0]
    cuda = Runtime(torch.version.cuda)
    launch = Graph(cuda, stream.cuda_stream, lambda: results.append(call()), 1).launch
    return launch, results[0]


def _calls(comm: Any, kind: torch.dtype) -> dict[str, Callable[[Any], Any]]:
    """Returns calls by name. Their argument has a block for each rank; some calls take only the first."""
    n, ahead, behind = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chain = ("chain",) if is_uniform(comm.nodes) else ()

    def uneven(x: Any) -> Any:
        counts = [x.shape[1] * ((comm.rank + peer) % 3) // 3 for peer in range(n)]
        return comm.all_to_all_v(x.reshape(-1)[: sum(counts)], counts, counts)

    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce in place": lambda x: comm.all_reduce(y := x[0].clone(), out=y),
        "all_gather": lambda x: comm.all_gather(x[0]),
        "all_to_all": comm.all_to_all,
        "all_to_all_v": uneven,
        "broadcast": lambda x: comm.broadcast(x[0].clone(), n - 1),
        "gather": lambda x: comm.gather(x[0], n - 1),
        "scatter": lambda x: comm.scatter(x, 0),
        "send_recv": lambda x: comm.send_recv(x[0], ahead, None, behind),
    }
    for how in (None, "one_shot", "two_shot", *chain):
        for op in ("sum", "avg", "prod", "min", "max"):
            calls[f"all_reduce {op} {how}"] = lambda x, op=op, how=how: comm.all_reduce(
                x[0], op, algorithm=how
            )
        calls[f"reduce {how}"] = lambda x, how=how: comm.reduce(x[0], n // 2, algorithm=how)
    for how in (None, "two_shot", *chain):
        calls[f"reduce_scatter {how}"] = lambda x, how=how: comm.reduce_scatter(x, algorithm=how)
    if kind in (torch.float32, torch.bfloat16, torch.float16):
        for wire in quantised.WIRES:
            for op in ("sum", "avg"):
                calls[f"all_reduce {op} as {wire}"] = lambda x, op=op, wire=wire: comm.all_reduce(
                    x[0], op, wire=wire
                )
    return calls


def _same(got: Any, expected: Any) -> bool:
    """Returns whether the bits are the same. All NaNs count as equal."""
    if got is None or expected is None:
        return got is expected
    got = got.cpu()
    if got.dtype.is_floating_point:
        both = got.double().isnan() & expected.double().isnan()
        got, expected = (x.double().masked_fill(both, 0) for x in (got, expected))
    return torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
