"""What the ranks of test_faults.py do. Each function is one rank's program; what it returns is that rank's
result.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import ranks
import unisono
from rank_main import describe
from unisono import bootstrap, launch

FLOATS = np.float32
LATE_S = 1.0  # the deadline of a call that a rank does not come to


def init_in_peace(timeout_s: float, **options: Any) -> unisono.Communicator:
    """A communicator whose calls have that deadline, but not the ranks' start and their meeting."""
    return unisono.init(timeout_s=timeout_s, bootstrap=_patient_bootstrap(), **options)


def _patient_bootstrap() -> bootstrap.Bootstrap:
    return bootstrap.make(launch.from_env(os.environ), timeout_s=30)


class Meeting:
    """The ranks' way to talk that has nothing to do with the communicator under test."""

    def __init__(self) -> None:
        self._bootstrap = _patient_bootstrap()

    def tell(self, value: Any = None) -> list[Any]:
        """Everyone's value, in rank order; returns when all have come."""
        return [json.loads(said) for said in self._bootstrap.all_gather(json.dumps(value).encode())]


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    """How a call ended: {"error", "at"} with the error described, or {"at"} alone; `at` on the clock of
    all processes.
    """
    try:
        call()
    except BaseException as error:
        return {"error": describe(error), "at": time.monotonic()}
    return {"at": time.monotonic()}


def calls_of(comm: unisono.Communicator, memory: str) -> dict[str, Callable[[], object]]:
    """Calls that need every rank."""
    small, n = np.ones(8, FLOATS), comm.size
    shape = (n, 1 << 18)
    large = comm.empty(shape, FLOATS) if memory == "symmetric" else np.ones(shape, FLOATS)
    large[:] = 1
    return {
        "barrier": comm.barrier,
        "all_reduce small": lambda: comm.all_reduce(small),
        "all_reduce large": lambda: comm.all_reduce(large, out=large),
        "all_reduce staged": lambda: comm.all_reduce(large, out=large, algorithm="two_shot"),
        "all_gather": lambda: comm.all_gather(large[comm.rank].copy()),
        "all_to_all": lambda: comm.all_to_all(large),
        "all_to_all_v": lambda: comm.all_to_all_v(np.ones(2 * n, FLOATS), [2] * n, [2] * n),
        "empty": lambda: comm.empty(10, FLOATS),
    }


def wait_for_end(pid: int) -> float:
    """When the process has ended, on the clock of all processes."""
    ended = select.poll()
    pidfd = os.pidfd_open(pid)
    ended.register(pidfd, select.POLLIN)
    ended.poll(20_000)
    os.close(pidfd)
    return time.monotonic()


def _wait_for_sleep(pid: int) -> None:
    """Until a process sleeps as in a call that waits, on a futex or (fabric lane) in naps; where the kernel
    does not tell, until it must.
    """
    began, tells = time.monotonic(), False
    while time.monotonic() < began + (20 if tells else 2):
        with contextlib.suppress(OSError):
            where = Path(f"/proc/{pid}/wchan").read_text()
            if re.search("futex|nanosleep", where):
                return
            tells |= where not in ("", "0")
        time.sleep(0.01)


def killed_inside(what: str, memory: str, check: bool, victim: int) -> dict[str, Any]:
    """Rank `victim` is killed while it waits inside a call with another; the last rank comes when it is
    dead.
    """
    comm = unisono.init(timeout_s=30, check=check)
    meeting = Meeting()
    call = calls_of(comm, memory)[what]
    call()
    pids = meeting.tell(os.getpid())
    if comm.rank == victim:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        call()
    died = wait_for_end(pids[victim]) if comm.rank == comm.size - 1 else None

    def until_it_fails() -> None:  # the victim had done its part of a call that needs no more of it
        for _ in range(3):
            call()

    first = attempt(until_it_fails)
    again = [attempt(comm.barrier), attempt(lambda: comm.all_reduce(np.ones(3, FLOATS)))]
    comm.close()
    return {"victim": pids[victim], "died": died, "first": first, "again": again}


def last_is_killed(comm: unisono.Communicator, meeting: Meeting, seconds: float) -> dict[str, Any]:
    """The last rank is killed `seconds` after all have come, whatever it does then: who, and when."""
    pids = meeting.tell(os.getpid())
    dies_at = max(meeting.tell(time.monotonic())) + seconds
    if comm.rank == comm.size - 1:
        left = max(dies_at - time.monotonic(), 0)
        threading.Timer(left, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return {"victim": pids[-1], "died": dies_at}


def killed_in_traffic(seconds: float) -> dict[str, Any]:
    """The last rank is killed anywhere in a stream of large calls."""
    comm = unisono.init(timeout_s=30)
    meeting = Meeting()
    x = np.ones((comm.size, 1 << 18), FLOATS)
    shared = comm.empty(x.shape, FLOATS)
    out = np.empty_like(x)
    death = last_is_killed(comm, meeting, seconds)

    def stream() -> None:
        while True:
            comm.all_reduce(x, out=out)
            comm.all_to_all(out, out=shared)
            comm.all_reduce(x, out=out, algorithm="two_shot")
            comm.broadcast(shared, root=comm.size - 1)

    return {**death, "first": attempt(stream)}


def never_comes(what: str) -> dict[str, Any]:
    """The last rank stays away until the others have given up."""
    meeting = Meeting()
    comm = init_in_peace(LATE_S, check=True)
    call = calls_of(comm, "plain")[what]
    meeting.tell()
    began = time.monotonic()
    if comm.rank == comm.size - 1:
        meeting.tell()
        return {"first": attempt(call), "again": [attempt(comm.barrier)], "waited": 0}
    first = attempt(call)
    waited = time.monotonic() - began
    meeting.tell()
    return {"first": first, "again": [attempt(comm.barrier)], "waited": waited}


def stopped() -> dict[str, Any]:
    """Rank 1 is stopped for longer than the deadline, and goes on afterwards."""
    meeting = Meeting()
    pids = meeting.tell(os.getpid())
    comm = init_in_peace(LATE_S)
    x = np.ones(1 << 20, FLOATS)
    meeting.tell()
    if comm.rank == 0:
        ranks.wait_for_state(pids[1], "T")
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return {"first": attempt(lambda: comm.all_reduce(x)), "again": [attempt(comm.barrier)]}
    first = attempt(lambda: comm.all_reduce(x))
    if comm.rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    return {"first": first, "again": [attempt(comm.barrier)]}


def stopped_in_traffic(rounds: int, victim: int) -> list[dict[str, Any]]:
    """Rank `victim` is stopped anywhere in a stream of calls, in each round of a new communicator."""
    meeting = Meeting()
    pids = meeting.tell(os.getpid())
    said = []
    for _ in range(rounds):
        comm = init_in_peace(0.5)
        x, row = np.ones(1 << 12, FLOATS), np.ones((comm.size, 64), FLOATS)

        def stream(comm: unisono.Communicator = comm, x: Any = x, row: Any = row) -> None:
            while True:
                comm.all_reduce(x)
                comm.barrier()
                comm.all_to_all(row)
                comm.broadcast(x, root=comm.size - 1)

        meeting.tell()
        if comm.rank == 0:
            stop = threading.Timer(0.05, lambda: os.kill(pids[victim], signal.SIGSTOP))
            stop.start()
        first = attempt(stream)
        if comm.rank == 0:
            stop.join()
            os.kill(pids[victim], signal.SIGCONT)
        said.append(first)
        meeting.tell()
        comm.close()
    return said


def leaves_early(how: str) -> dict[str, Any]:
    """Rank 1 ends in one way or another, while rank 0 calls on."""
    comm = unisono.init(timeout_s=30)
    comm.barrier()
    if comm.rank == 1:
        if how == "close":
            comm.close()
            return {}
        if how == "del":
            del comm
            return {}
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(0)
        raise RuntimeError("this rank gives up")
    return {"first": attempt(lambda: comm.all_reduce(np.ones(4, FLOATS))), "again": [attempt(comm.barrier)]}


def leaves_after_its_part() -> dict[str, Any]:
    """A rank that has done its part of every call may go: rank 1 sends, closes and ends, then rank 0
    receives.
    """
    comm = unisono.init(timeout_s=30)
    meeting = Meeting()
    if comm.rank == 1:
        comm.send(np.arange(100, dtype=FLOATS), 0)
        comm.close()
        meeting.tell()
        return {}
    meeting.tell()
    got = np.zeros(100, FLOATS)
    return {"first": attempt(lambda: comm.recv(got, 1)), "sum": float(got.sum())}


def forked() -> dict[str, Any]:
    """Rank 0 forks a child that calls, and ends as a Python program does; then the ranks go on. All drop
    symmetric memory that the child keeps."""
    comm = unisono.init(timeout_s=30)
    x, dropped, kept = (comm.empty(1 << 18, FLOATS) for _ in range(3))
    x[:] = kept[:] = 1
    comm.all_reduce(x, out=x)
    meeting = Meeting()
    child_says = None
    if comm.rank == 0:
        reader, writer = os.pipe()
        dropped_by_all, tell_dropped = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                tried = attempt(lambda: comm.all_reduce(np.ones(4, FLOATS)))
                looked = attempt(comm.raise_if_failed)
                os.read(dropped_by_all, 1)
                del dropped
                said = {"call": tried, "looked": looked, "kept": float(kept.sum())}
                os.write(writer, json.dumps(said).encode())
                comm.close()
                del x, kept, comm
            sys.stdout.flush()
            sys.exit(0)
        os.close(writer)
    del dropped, kept
    meeting.tell()
    if comm.rank == 0:
        os.write(tell_dropped, b"1")
        with os.fdopen(reader) as pipe:
            child_says = json.loads(pipe.read())
        os.waitpid(child, 0)
    again = attempt(lambda: comm.all_reduce(x, out=x))
    y = comm.empty(1 << 18, FLOATS)
    y[:] = x
    return {"child": child_says, "again": again, "sum": float(comm.all_reduce(y)[-1])}


def out_of_memory_within_a_call() -> dict[str, Any]:
    """Two ranks, threads of one process, exchange messages; rank 0, in place, may not have the memory for
    it."""
    zero, one = unisono.init_threads(2, timeout_s=30)
    x, y, z = (np.ones(64 << 20, np.uint8) for _ in range(3))
    said: dict[str, Any] = {}

    def rank_1() -> None:
        said["peer"] = attempt(lambda: one.send_recv(y, 0, z, 0))

    peer = threading.Thread(target=rank_1)
    peer.start()
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), before[1]))
    said["first"] = attempt(lambda: zero.send_recv(x, 1, x, 1))
    resource.setrlimit(resource.RLIMIT_AS, before)
    peer.join()
    return said | {"closed": zero.closed, "again": attempt(zero.barrier)}


def interrupted() -> dict[str, Any]:
    """Ctrl-C reaches rank 0 while it waits for rank 1, who then needs it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    comm = unisono.init(timeout_s=30)
    pids = Meeting().tell(os.getpid())
    if comm.rank == 0:
        first = attempt(lambda: comm.recv(np.zeros(4, FLOATS), 1))
        return {"first": first, "closed": comm.closed, "again": [attempt(comm.barrier)]}
    _wait_for_sleep(pids[0])
    sent = time.monotonic()
    os.kill(pids[0], signal.SIGINT)
    return {"first": attempt(lambda: comm.recv(np.zeros(4, FLOATS), 0)), "sent": sent}


def closed_by_another_thread() -> dict[str, Any]:
    """Rank 0 closes while a thread of its own waits for rank 1, who then needs it."""
    comm = unisono.init(timeout_s=30)
    comm.barrier()
    meeting = Meeting()
    if comm.rank == 0:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(attempt, lambda: comm.recv(np.zeros(4, FLOATS), 1))
            time.sleep(0.5)
            comm.close()
            first = waiting.result()
        meeting.tell()
        meeting.tell()  # alive until rank 1 has said what it hears
        return {"first": first}
    meeting.tell()
    first = attempt(comm.barrier)
    meeting.tell()
    return {"first": first}


def handler_raises() -> dict[str, Any]:
    """A signal handler of the program raises while a call waits."""

    def give_up(number: int, frame: object) -> None:
        raise RuntimeError("the handler gives up")

    signal.signal(signal.SIGUSR1, give_up)
    comm = unisono.init(timeout_s=30)
    meeting = Meeting()
    pids = meeting.tell(os.getpid())
    if comm.rank == 0:
        first = attempt(comm.barrier)
        meeting.tell()
        return {"first": first, "closed": comm.closed}
    _wait_for_sleep(pids[0])
    os.kill(pids[0], signal.SIGUSR1)
    meeting.tell()
    return {"first": attempt(comm.barrier)}


def handler_returns() -> float:
    """A signal that is handled, within the wait of rank 0, does not end it."""
    comm = unisono.init(timeout_s=30)
    meeting = Meeting()
    signal.signal(signal.SIGUSR1, lambda number, frame: meeting.tell())
    pids = meeting.tell(os.getpid())
    if comm.rank == 1:
        _wait_for_sleep(pids[0])
        os.kill(pids[0], signal.SIGUSR1)
        meeting.tell()  # returns once the handler has run
    return float(comm.all_reduce(np.ones(1, FLOATS))[0])


def stopped_past_the_deadline() -> float:
    """Rank 0 is stopped for longer than its deadline while it waits, as with a machine that is paused."""
    comm = init_in_peace(4)
    pids = Meeting().tell(os.getpid())
    if comm.rank == 1:
        _wait_for_sleep(pids[0])
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(5)
        os.kill(pids[0], signal.SIGCONT)
        time.sleep(0.1)  # it waits on, and looks at the clock
    return float(comm.all_reduce(np.ones(1, FLOATS))[0])


def without_the_gil() -> dict[str, Any]:
    """A call with a deadline of 1 s, in which another thread keeps the GIL for 0.9 s at a time."""
    comms = unisono.init_threads(2, timeout_s=1)
    keeps_the_gil, done = ctypes.PyDLL(None), threading.Event()

    def keep() -> None:
        while not done.is_set():
            keeps_the_gil.usleep(900_000)

    keeper = threading.Thread(target=keep)
    keeper.start()
    began = time.monotonic()
    first = attempt(comms[0].barrier)
    waited = time.monotonic() - began
    done.set()
    keeper.join()
    return {"first": first, "waited": waited}


def differs_on_rank_1() -> None:
    """All ranks call all_reduce, rank 1 with another count."""
    comm = unisono.init(timeout_s=20, check=True)
    comm.all_reduce(np.ones(4 + (comm.rank == 1), FLOATS))


def direct_without_reach() -> dict[str, Any]:
    """The direct algorithm is asked for on plain memory."""
    comm = unisono.init(timeout_s=20)
    x = np.ones(4, FLOATS)
    first = attempt(lambda: comm.all_reduce(x, algorithm="two_shot_direct"))
    return {"first": first, "sum": float(comm.all_reduce(x)[0])}


def checks_on_rank_0() -> None:
    """Only rank 0 is to compare calls."""
    rank = launch.from_env(os.environ).rank
    unisono.init(timeout_s=30, check=rank == 0)
