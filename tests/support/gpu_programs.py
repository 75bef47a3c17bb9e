"""The programs of ranks in tests/gpu, a process each. Each function is one rank's program, and returns its
result.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

import unisono
from fault_programs import Meeting, attempt, wait_for_end
from gpu_cases import ALL, arguments, check, direct_algorithms, expected, plain_algorithms, shapes
from gpus import Gpus, devices_for, gpus, numbers, random_bits
from reference import DTYPES, difference
from unisono import launch

COUNTS = (1, 1000, 100_003)  # elements of the larger buffer, about


class Rank:
    """This process's communicator, which calls on the current stream of its GPU."""

    def __init__(self, timeout_s: float | None = None, **options: Any) -> None:
        import torch

        if timeout_s is None:
            timeout_s = float(os.environ.get("UNISONO_TIMEOUT_S", "20"))

        world = launch.from_env(os.environ)
        devices, max_sms = devices_for(world.size)
        self.device = devices[world.rank]
        torch.cuda.set_device(self.device)
        torch.zeros(1, device="cuda")
        self.meeting = Meeting()
        self.meeting.tell()  # waits for all to start CUDA, which a short deadline is not for
        self.comm = unisono.init(device=self.device, max_sms=max_sms, timeout_s=timeout_s, **options)
        self.rank, self.size = world.rank, world.size

    def put(self, host: Any) -> Any:
        """Returns a tensor with these bits on the GPU."""
        import torch

        return Gpus.view(
            torch.from_numpy(np.ascontiguousarray(host).view(np.uint8).reshape(-1)).to(self.device), host
        )

    def wait(self) -> None:
        import torch

        self.comm.synchronize(torch.cuda.current_stream())


def collectives(dtype: str, counts: Sequence[int] = COUNTS) -> dict[str, Any]:
    """Makes every collective by every algorithm that runs here, on plain and symmetric memory. Returns the
    wrong calls."""
    import torch

    here = Rank(check=False)
    comm, me, n = here.comm, here.rank, here.size
    pool_x, pool_out = (comm.empty(1 << 20, torch.uint8) for _ in range(2))
    wrong, made = [], 0
    for collective in ALL:
        ways = [(name, False) for name in plain_algorithms(collective, comm.nvlink, n)] + [(None, True)]
        ways += [(name, True) for name in direct_algorithms(collective, n)] if comm.peer_access else []
        for count in counts:
            rng, root = np.random.default_rng(count), count % n
            x_shape, out_shape = shapes(collective, count, n)
            xs = [random_bits(rng, x_shape, dtype) for _ in range(n)]
            wanted = expected(collective, xs, root, "sum")[me]
            for algorithm, symmetric in ways:
                x, out = here.put(xs[me]), here.put(random_bits(rng, out_shape, dtype))
                if symmetric:
                    raw = pool_x[: x.nbytes]
                    raw.copy_(x.view(-1).view(raw.dtype) if x.numel() else raw)
                    x = Gpus.view(raw, xs[me])
                    out = Gpus.view(pool_out[: out.nbytes], np.empty(out_shape, DTYPES[dtype]))
                how = arguments(collective, "sum", root) | {"algorithm": algorithm}
                result = getattr(comm, collective)(x, out=out, **how)
                here.wait()
                made += 1
                if wanted is not None and difference(numbers(result, dtype), wanted) is not None:
                    wrong.append(f"{collective} of {count} {dtype} by {algorithm}, symmetric {symmetric}")
    comm.close()
    return {"wrong": wrong, "made": made, "peer_access": comm.peer_access}


def messages(most: int) -> dict[str, Any]:
    """Makes an all_to_all_v of parts below `most` bytes, by every algorithm that runs here, to plain and
    symmetric memory. Returns the wrong calls."""
    import torch

    here = Rank(check=False)
    comm, me, n = here.comm, here.rank, here.size
    rng = np.random.default_rng(n)  # the same on every rank
    counts = rng.integers(0, most, (n, n))
    parts = [[random_bits(rng, (count,), "u8") for count in row] for row in counts.tolist()]
    x = here.put(np.concatenate(parts[me]))
    wanted = np.concatenate([row[me] for row in parts])
    outs = [
        comm.empty(n * most, torch.uint8)[: len(wanted)],
        torch.empty(len(wanted), dtype=torch.uint8).to(x),
    ]
    ways = plain_algorithms("all_to_all_v", comm.nvlink)
    ways += direct_algorithms("all_to_all_v", n) if comm.peer_access else []
    wrong, made = [], 0
    for algorithm, out in product(ways, outs):
        out.zero_()
        comm.all_to_all_v(x, counts[me].tolist(), counts[:, me].tolist(), out=out, algorithm=algorithm)
        here.wait()
        made += 1
        if difference(numbers(out, "u8"), wanted) is not None:
            wrong.append(f"all_to_all_v by {algorithm}, symmetric {out is outs[0]}")
    comm.close()
    return {"wrong": wrong, "made": made}


def threads(n: int) -> int:
    """Makes every collective between `n` ranks in this one process. Returns the number of calls."""
    import torch

    made = 0
    with gpus(n) as ranks:
        pools = [ranks.comms.empty(1 << 20, torch.uint8) for _ in range(2)]
        for collective in ALL:
            direct = direct_algorithms(collective, n) if ranks.reach else []
            for algorithm in [*plain_algorithms(collective, ranks.nvlink), *direct]:
                check(
                    ranks,
                    collective,
                    100_003,
                    "f32",
                    "sum",
                    algorithm,
                    pools if algorithm in direct else None,
                )
                made += 1
    return made


def one_forbids() -> dict[str, Any]:
    """Makes a call with peer access switched off on rank 1 alone."""
    import torch

    here = Rank(peer_access=launch.from_env(os.environ).rank != 1, check=False)
    x = torch.ones(1000, device=here.device)
    here.comm.all_reduce(x, out=x)
    here.wait()
    return {"peer_access": here.comm.peer_access, "sum": float(x.sum())}


class Call:
    """An all_reduce by `algorithm`, on symmetric memory if needed, and the wait for it."""

    def __init__(self, here: Rank, algorithm: str | None, count: int = 100_000) -> None:
        import torch

        direct = algorithm in direct_algorithms("all_reduce", here.size)
        make = here.comm.empty if direct else lambda n: torch.empty(n, device=here.device)
        self._x, self._out = make(count), make(count)
        self._x.fill_(1)
        self._here, self._algorithm = here, algorithm

    def enqueue(self) -> None:
        self._here.comm.all_reduce(self._x, out=self._out, algorithm=self._algorithm)

    def __call__(self) -> None:
        self.enqueue()
        self._here.wait()


def killed(when: str, algorithm: str | None, victim: int) -> dict[str, Any]:
    """Kills rank `victim` before a call, or while its kernel waits for a rank that comes after the death."""
    here = Rank(timeout_s=30, check=False)
    call = Call(here, algorithm)
    call()
    pids = here.meeting.tell(os.getpid())
    if here.rank == victim:
        if when == "inside":
            call.enqueue()
            time.sleep(0.2)  # lets the kernel begin
        os.kill(os.getpid(), signal.SIGKILL)
    last = here.size - 1 if victim != here.size - 1 else 0
    died = wait_for_end(pids[victim]) if here.rank == last else None

    def until_it_fails() -> None:  # the victim may have done its part of the first call
        for _ in range(3):
            call()

    first = attempt(until_it_fails)
    again = [attempt(call), attempt(here.comm.barrier)]
    here.comm.close()
    return {"victim": pids[victim], "died": died, "first": first, "again": again}


def late(algorithm: str | None, deadlines_s: list[float]) -> dict[str, Any]:
    """Makes a call from which the last rank stays away until the others have given up. Each has its own
    deadline."""
    here = Rank(timeout_s=deadlines_s[launch.from_env(os.environ).rank], check=False)
    call = Call(here, algorithm)
    call()
    here.meeting.tell()
    began = time.monotonic()
    first = attempt(call) if here.rank < here.size - 1 else None
    here.meeting.tell()
    if first is None:
        began, first = time.monotonic(), attempt(call)
    again = [attempt(call), attempt(here.comm.barrier)]
    here.comm.close()
    return {"first": first, "waited": first["at"] - began, "again": again}


def replayed() -> dict[str, Any]:
    """Replays a graph on rank 0 whose calls the others do not make. Then every replay of any rank raises."""
    import torch

    here = Rank(timeout_s=3, check=False)
    x = torch.ones(1000, device=here.device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        here.comm.all_reduce(x, out=x)
        here.comm.synchronize(stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(3):
                here.comm.all_reduce(x, out=x)
        x.fill_(1)

        def replay() -> None:
            graph.replay()
            here.comm.synchronize(stream)

        replay()
        sums = x.unique().tolist()
        here.meeting.tell()
        first = attempt(replay) if here.rank == 0 else None
        here.meeting.tell()
        again = [attempt(replay), attempt(replay)]
    here.comm.close()
    return {"sums": sums, "first": first or again[0], "again": again}


def differs(what: str) -> None:
    """Makes calls of which rank 1's differs. The ranks compare their calls first."""
    import torch

    here = Rank(check=True)
    other = here.rank == 1
    count = 5 if what == "count" and other else 4
    dtype = torch.float64 if what == "dtype" and other else torch.float32
    x = torch.ones(count, dtype=dtype, device=here.device)
    if what in ("place", "out"):
        pool = here.comm.empty(12)
        x = pool[4:8] if what == "place" and other else pool[:4]
    if what == "out":  # only the root passes out
        here.comm.reduce(x, out=pool[8:] if here.rank == 0 else None)
    elif what == "plan":  # each message goes by its own size
        here.comm.set_plan([("all_to_all_v", False, None, "direct" if other else "push_ll128")])
        here.comm.all_to_all_v(x[: here.size], [1] * here.size, [1] * here.size)
    elif what == "norm":  # its sums would have a place on the other rank alone
        row, weight = x.reshape(1, 4), torch.ones_like(x)
        options = unisono.NormOptions(quant="fp8_token", residual_out=torch.empty_like(row) if other else row)
        here.comm.all_reduce_rms_norm(torch.ones_like(row), row, weight, options=options)
    elif what == "collective" and other:
        here.comm.broadcast(x)
    else:
        here.comm.all_reduce(x, "max" if what == "op" and other else "sum", out=x)
    here.wait()
