"""The programs of tests/gpu/test_registration.py: processes that register GPU memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np

from fault_programs import attempt
from gpu_cases import ALL, arguments, direct_algorithms, expected, shapes
from gpu_programs import Rank
from gpus import Gpus, numbers, random_bits
from reference import DTYPES, difference

POOL = 4 << 20


def collectives(dtype: str) -> dict[str, Any]:
    """Every collective by every algorithm that reaches into peers' memory, on views of registered tensors:
    which were wrong."""
    import torch

    here = Rank(check=True)
    comm, me, n = here.comm, here.rank, here.size
    # apart on each rank, so that allocations and offsets differ
    kept = torch.empty((me + 1) << 20, dtype=torch.uint8, device=here.device)
    pools = [torch.empty(POOL, dtype=torch.uint8, device=here.device) for _ in range(2)]
    registrations = [comm.register(pool) for pool in pools]
    wrong, made = [], 0
    for number, collective in enumerate(ALL):
        ways = [None, *(direct_algorithms(collective, n) if comm.peer_access else [])]
        for count in (1, 1000, 100_003):
            rng, root, begin = np.random.default_rng(count), count % n, 16 * number
            x_shape, out_shape = shapes(collective, count, n)
            xs = [random_bits(rng, x_shape, dtype) for _ in range(n)]
            wanted = expected(collective, xs, root, "sum")[me]
            for algorithm in ways:
                x = here.put(xs[me])
                raw = pools[0][begin : begin + x.nbytes]
                raw.copy_(x.view(-1).view(raw.dtype) if x.numel() else raw)
                nbytes = int(np.prod(out_shape)) * DTYPES[dtype].itemsize
                out = Gpus.view(pools[1][begin : begin + nbytes], np.empty(out_shape, DTYPES[dtype]))
                how = arguments(collective, "sum", root) | {"algorithm": algorithm}
                given = getattr(comm, collective)(Gpus.view(raw, xs[me]), out=out, **how)
                here.wait()
                made += 1
                if wanted is not None and difference(numbers(given, dtype), wanted) is not None:
                    wrong.append(f"{collective} of {count} {dtype} by {algorithm}")
    for registration in registrations:
        registration.close()
    peer_access = comm.peer_access
    comm.close()
    del kept
    return {"wrong": wrong, "made": made, "peer_access": peer_access}


def one_segment() -> dict[str, Any]:
    """Two tensors of one allocation of torch's, registered, closed and registered again by turns; a message
    from one of them."""
    import torch

    here = Rank(check=False)
    comm, me, n = here.comm, here.rank, here.size
    pair = [torch.zeros(n, 25_000, device=here.device) for _ in range(2)]
    told: dict[str, Any] = {"apart": abs(pair[1].data_ptr() - pair[0].data_ptr()), "wrong": []}

    def exchange(x: Any, out: Any, when: str) -> None:
        numbers_ = torch.arange(n, device=here.device)[:, None]
        x.copy_(numbers_.expand_as(x) + n * me)
        here.comm.all_to_all(x, out=out, algorithm="direct")
        here.wait()
        if not (out == n * numbers_ + me).all():
            told["wrong"].append(when)

    told["before"] = attempt(lambda: exchange(*pair, "before"))
    one, other = comm.register(pair[0]), comm.register(pair[1])
    exchange(*pair, "both")
    one.close()
    told["between"] = attempt(lambda: exchange(pair[1], pair[0], "between"))
    exchange(*pair, "one of them")  # peers write into the second alone
    if me == 0:
        comm.send(pair[1][0], n - 1)
    elif me == n - 1:
        comm.recv(pair[1][0], 0)
    here.wait()
    again = comm.register(pair[0])
    exchange(pair[1], pair[0], "again")
    other.close()
    again.close()
    with comm.register(pair[0]), comm.register(pair[1]):
        exchange(*pair, "at last")
    kept = weakref.ref(pair[0])
    comm.register(pair[0])
    pair.clear()
    gc.collect()
    told["alive"] = kept() is not None
    comm.close()
    del comm, here.comm
    gc.collect()
    told["gone"] = kept() is None
    return told


def refused(kinds: list[str]) -> dict[str, Any]:
    """The last rank registers what CUDA does not share, the others a tensor: every rank hears of it, and goes
    on, with nothing left open."""
    import torch

    here = Rank(check=False)
    comm, last = here.comm, here.rank == here.size - 1
    good = torch.ones(1000, device=here.device)
    told = {}
    for kind in kinds:
        bad = _bad(kind, here) if last else None
        told[kind] = attempt(lambda bad=bad: comm.register(bad if last else good)).get("error")
    with comm.register(good) as registration:
        told["sum"] = float(comm.all_reduce(good)[-1])
        told["overlap"] = attempt(lambda: comm.register(good[10:20])).get("error")
        told["bytes"] = registration.nbytes
    return told


def expandable() -> dict[str, Any]:
    """torch's tensors lie in expandable segments here, which CUDA does not share by handles."""
    import torch

    here = Rank(check=False)
    x = torch.ones(1000, device=here.device)
    first = attempt(lambda: here.comm.register(x))
    return {"first": first, "sum": float(here.comm.all_reduce(x)[-1])}


def _bad(kind: str, here: Rank) -> Any:
    import torch

    match kind:
        case "strides":
            return torch.ones(2000, device=here.device)[::2]
        case "shorter":
            return torch.ones(999, device=here.device)
        case "host":
            return np.ones(1000, np.float32)
    import cupy

    allocate = {"managed": cupy.cuda.malloc_managed, "pool": cupy.cuda.malloc_async}[kind]
    return cupy.ndarray((1000,), cupy.float32, memptr=allocate(4000))
