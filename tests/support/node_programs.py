"""The programs of ranks in test_nodes.py and test_nodes_hosts.py."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import unisono
from body import Report, UnisonoSubject, run
from fault_programs import attempt
from worker import _works

F32 = np.float32


def layout(nodes: str) -> None:
    """Puts each rank on the virtual node of its letter."""
    if nodes:
        os.environ["UNISONO_NODE"] = nodes[unisono.launch.from_env(os.environ).rank]


def sample(step: int, first: int = 0) -> dict[str, Any]:
    """Makes every `step`-th call of the contract's matrix. Returns the ranks' nodes, and what was wrong."""
    unchecked = unisono.init(timeout_s=60, check=False)
    checked = unisono.init(timeout_s=60, check=True)
    report = Report()
    run(_works(unchecked)[first::step], UnisonoSubject(unchecked, checked), report)
    return {
        "nodes": checked.nodes,
        "transport": checked.transport,
        "calls": sum(report.done.values()),
        "words": report.words,
    }


def refusals() -> dict[str, str]:
    """Makes calls that are wrong by themselves. Returns the errors that lack the expected words."""
    comm = unisono.init(timeout_s=20, check=False)
    x, n = np.zeros((comm.size, 4), F32), comm.size
    line = x.reshape(-1)
    wrong: dict[str, tuple[Any, str]] = {
        "op": (lambda: comm.all_reduce(x, "median"), "no op 'median'"),
        "root": (lambda: comm.broadcast(x, n), f"root {n} is not a rank"),
        "half a count": (lambda: comm.all_to_all_v(x[0], [1.5] * n, [1] * n), "are no numbers of elements"),
        "collective": (lambda: comm.plan("all_broadcast", 8), "no collective 'all_broadcast'"),
        "shape": (lambda: comm.all_to_all(x[0]), "first axis is the ranks"),
        "out": (lambda: comm.all_gather(x, out=x), "out has shape"),
        "dtype": (lambda: comm.all_reduce(x, out=x.astype(np.float64)), "give both the same"),
        "overlap": (lambda: comm.all_reduce(x.reshape(-1)[:-1], out=x.reshape(-1)[1:]), "overlap"),
        "overlap of a root": (lambda: comm.broadcast(line[1:], comm.rank, out=line[:-1]), "overlap"),
        "overlap of a batch": (lambda: comm.batch_send_recv([(x, 0)], [(x, 0)]), "overlaps another"),
        "twice": (lambda: comm.batch_send_recv([(x, 0), (x, 0)], []), "two messages with destination 0"),
        "algorithm": (lambda: comm.all_gather(x, algorithm="ring"), "leave it out"),
        "chain": (lambda: comm.all_reduce(x, algorithm="chain"), "as many ranks on every node"),
        "wire": (lambda: comm.all_reduce(x, wire="fp4"), "no wire 'fp4'"),
        "wire of max": (lambda: comm.all_reduce(x, "max", wire="fp8"), "for sum and avg, not max"),
        "wire of i32": (lambda: comm.all_reduce(x.astype("i4"), wire="fp8"), "f32, f16 and bf16, not i32"),
        "wire by": (lambda: comm.all_reduce(x, wire="int8", algorithm="one_shot"), "not by one_shot"),
        "chain to a root": (lambda: comm.reduce(x, algorithm="chain"), "as many ranks on every node"),
        "one shot": (lambda: comm.reduce_scatter(x, algorithm="one_shot"), "use one of two_shot, chain"),
        "counts": (lambda: comm.all_to_all_v(x[0], [4], [4]), f"needs {n} send counts"),
        "peer": (lambda: comm.send(x, comm.rank), "cannot send to itself"),
        "stream": (lambda: comm.all_reduce(x, stream=1), "arrays on a GPU"),
        "synchronize": (comm.synchronize, "has no GPU"),
        "list": (lambda: comm.all_reduce([1.0]), "x is a"),
    }
    other = {}
    for name, (call, word) in wrong.items():
        error = attempt(call).get("error", {"type": "none", "text": ""})
        if error["type"] != "UsageError" or word not in error["text"]:
            other[name] = str(error)
    harmless = {  # refused by the machine, or of a wrong type: the communicator goes on
        "ResourceError": [lambda: comm.empty(1 << 62, "u8")],
        "TypeError": [
            lambda: comm.empty(4, None),
            lambda: comm.broadcast(x, 0.5),
            lambda: comm.send_recv(x, 0.5, x.copy(), 0.5),
            lambda: comm.batch_send_recv([(x, 0.5)], []),
            lambda: comm.all_reduce(x, op=None),
            lambda: comm.broadcast(x, root=None),
            lambda: comm.send(x, peer=None),
        ],
        "ValueError": [lambda: comm.empty((0, 2**62)), lambda: comm.empty((1,) * 65)],
        "UsageError": [
            lambda: comm.empty(3, "\ud800"),
            lambda: comm.all_reduce(x, algorithm="ring"),
            lambda: comm.all_reduce(x, op="sum\0x"),
        ],
    }
    for kind, calls in harmless.items():
        for number, call in enumerate(calls):
            if (error := attempt(call).get("error", {})).get("type") != kind:
                other[f"{kind} {number}"] = str(error)
    comm.raise_if_failed()
    comm.barrier()  # nothing has moved, and no rank has failed
    if comm.rank == 0:  # an empty input may lie within the output
        comm.all_to_all_v(line[1:1], [0] * n, [0] + [1] * (n - 1), out=line[: n - 1])
    else:
        comm.all_to_all_v(np.ones(1, F32), [1] + [0] * (n - 1), [0] * n)
    if comm.rank == 0 and line.sum() != n - 1:
        other["an empty input"] = str(line)
    comm.close()
    if "closed" not in attempt(comm.barrier)["error"]["text"]:
        other["closed"] = "not said"
    return other


def differ() -> None:
    """Makes a call for which the last rank has another op. The second call raises the same error."""
    comm = unisono.init(timeout_s=20, check=True)
    x, op = np.ones(8, F32), "max" if comm.rank == comm.size - 1 else "sum"
    first = attempt(lambda: comm.all_reduce(x, op))["error"]["text"]
    second = attempt(lambda: comm.all_reduce(x, "sum"))["error"]["text"]
    assert first == second, (first, second)
    comm.all_reduce(x)


def dies(rank: int, count: int) -> None:
    """Kills one rank. The others go on until they hear of it."""
    comm = unisono.init(timeout_s=20, check=False)
    x = np.ones(count, F32)
    for call in range(100_000):
        if comm.rank == rank and call == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(x)


def until_it_fails(flag: str, timeout_s: float, count: int) -> dict[str, Any]:
    """Makes all_reduces until one fails, and checks every result. Rank 0 writes the file `flag` once they are
    under way. Returns the error, the error of the next call, and the seconds that the failed call took."""
    if os.environ["UNISONO_TRANSPORT"] == "gloo":
        import torch.distributed  # noqa: F401  # takes seconds, which must not count for the deadline
    comm = unisono.init(timeout_s=timeout_s, check=False)
    x, right = np.full(count, comm.rank + 1, F32), sum(range(1, comm.size + 1))
    out = np.empty_like(x)
    for call in range(100_000):
        out.fill(0)
        began = time.monotonic()
        tried = attempt(lambda: comm.all_reduce(x, out=out))
        if "error" in tried:
            again = attempt(lambda: comm.all_reduce(x, out=out))
            atexit.register(_meet, flag, comm, next(node for node in comm.nodes if comm.rank in node))
            return {"error": tried["error"], "again": again.get("error"), "waited": tried["at"] - began}
        if not (out == right).all():
            return {"wrong": call}
        if comm.rank == 0 and call == 3:
            Path(flag).write_text("under way")
    return {"wrong": "it has not failed"}


def one_is_late(flag: str, nodes: str) -> dict[str, Any]:
    """Makes an all_gather from which the last rank stays away until the others have given up."""
    layout(nodes)
    comm = unisono.init(timeout_s=2, check=False)
    comm.barrier()
    atexit.register(_meet, flag, comm, range(comm.size))
    return {} if comm.rank == comm.size - 1 else attempt(lambda: comm.all_gather(np.ones(1000, F32)))


def other_lengths(flag: str, nodes: str) -> dict[str, Any]:
    """Gathers more on every rank than on the one before. Messages are so small that they leave when they are
    sent, since a rank that has failed no longer moves MPI."""
    layout(nodes)
    comm = unisono.init(timeout_s=20, check=False)
    comm.barrier()
    atexit.register(_meet, flag, comm, range(comm.size))
    return attempt(lambda: comm.all_gather(np.ones(10 * (1 + comm.rank), F32)))


def _meet(flag: str, comm: Any, ranks: Iterable[int]) -> None:
    """Waits for the ranks at exit, when rank_main has written the result. Hydra kills the others once a rank
    ends without MPI_Finalize."""
    Path(f"{flag} {comm.rank}").touch()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all(Path(f"{flag} {rank}").exists() for rank in ranks):
            return
        time.sleep(0.01)


def mpi_ends_first() -> dict[str, Any]:
    """The program finalizes MPI while two communicators are open, and closes one of them afterwards."""
    from mpi4py import MPI

    comm, other = (unisono.init(timeout_s=20, check=check) for check in (True, False))
    total = float(comm.all_reduce(np.ones(5, F32))[4])
    MPI.Finalize()
    first, second = (attempt(one.barrier)["error"] for one in (comm, other))
    comm.close()
    return {"sum": total, "first": first, "second": second, "closed": comm.closed}


def closes() -> list[float]:
    """Communicators of the world and of its halves, used in turn and closed in another order; then new
    ones."""
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    sums = []
    for _ in range(3):
        world, part = unisono.init(timeout_s=20), unisono.init(timeout_s=20, bootstrap=half)
        for comm in (part, world, part):
            sums.append(float(comm.all_reduce(np.ones(5, F32))[4]))
        world.close()
        sums.append(float(part.all_reduce(np.ones(1 << 20, F32))[-1]))
        part.close()
    return sums
