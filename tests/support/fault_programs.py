"""The programs of ranks in test_faults.py. Each function is one rank's program, and returns its result."""

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
LATE_S = 1.0  # the deadline of a call that one rank does not make


def init_in_peace(timeout_s: float, **options: Any) -> unisono.Communicator:
    """Returns a communicator whose calls have that deadline. The ranks' start has a longer one."""
    return unisono.init(timeout_s=timeout_s, bootstrap=_patient_bootstrap(), **options)


def _patient_bootstrap() -> bootstrap.Bootstrap:
    return bootstrap.make(launch.from_env(os.environ), timeout_s=30)


class Meeting:
    """Lets the ranks talk without the communicator under test."""

    def __init__(self) -> None:
        self._bootstrap = _patient_bootstrap()

    def tell(self, value: Any = None) -> list[Any]:
        """Waits for all ranks, and returns everyone's value, in rank order."""
        return [json.loads(text) for text in self._bootstrap.all_gather(json.dumps(value).encode())]


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    """Makes a call. Returns {"error", "at"} with the error described, or {"at"} alone. `at` is on the clock
    of all processes.
    """
    try:
        call()
    except BaseException as error:
        return {"error": describe(error), "at": time.monotonic()}
    return {"at": time.monotonic()}


def calls_of(comm: unisono.Communicator, memory: str) -> dict[str, Callable[[], object]]:
    """Returns calls that need every rank, by name."""
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
    """Waits until the process has ended. Returns the time, on the clock of all processes."""
    ended = select.poll()
    pidfd = os.pidfd_open(pid)
    ended.register(pidfd, select.POLLIN)
    ended.poll(20_000)
    os.close(pidfd)
    return time.monotonic()


def _wait_for_sleep(pid: int) -> None:
    """Waits until a process sleeps as in a call that waits: on a futex, or in naps (fabric lane). If the
    kernel does not report that, waits 2 s, by when the process must sleep.
    """
    began, reported = time.monotonic(), False
    while time.monotonic() < began + (20 if reported else 2):
        with contextlib.suppress(OSError):
            where = Path(f"/proc/{pid}/wchan").read_text()
            if re.search("futex|nanosleep", where):
                return
            reported |= where not in ("", "0")
        time.sleep(0.01)


def killed_inside(what: str, memory: str, check: bool, victim: int) -> dict[str, Any]:
    """Kills rank `victim` while it waits inside a call. The last rank comes after the death."""
    comm = unisono.init(timeout_s=30, check=check)
    meeting = Meeting()
    call = calls_of(comm, memory)[what]
    call()
    pids = meeting.tell(os.getpid())
    if comm.rank == victim:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        call()
    died = wait_for_end(pids[victim]) if comm.rank == comm.size - 1 else None

    def until_it_fails() -> None:  # the victim may have done its whole part of the first call
        for _ in range(3):
            call()

    first = attempt(until_it_fails)
    again = [attempt(comm.barrier), attempt(lambda: comm.all_reduce(np.ones(3, FLOATS)))]
    comm.close()
    return {"victim": pids[victim], "died": died, "first": first, "again": again}


def last_is_killed(comm: unisono.Communicator, meeting: Meeting, seconds: float) -> dict[str, Any]:
    """Kills the last rank `seconds` after all have come, whatever it does then. Returns its process and the
    time of death."""
    pids = meeting.tell(os.getpid())
    dies_at = max(meeting.tell(time.monotonic())) + seconds
    if comm.rank == comm.size - 1:
        left = max(dies_at - time.monotonic(), 0)
        threading.Timer(left, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return {"victim": pids[-1], "died": dies_at}


def killed_in_traffic(seconds: float) -> dict[str, Any]:
    """Kills the last rank anywhere in a stream of large calls."""
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
    """Makes a call from which the last rank stays away until the others have given up."""
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
    """Stops rank 1 for longer than the deadline. Rank 1 goes on afterwards."""
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
    """Stops rank `victim` anywhere in a stream of calls. Each round has a new communicator."""
    meeting = Meeting()
    pids = meeting.tell(os.getpid())
    results = []
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
        results.append(first)
        meeting.tell()
        comm.close()
    return results


def leaves_early(how: str) -> dict[str, Any]:
    """Ends rank 1 by `how`, while rank 0 goes on calling."""
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
    """Ends a rank that has done its part: rank 1 sends, closes and ends, then rank 0 receives."""
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
    """Forks a child of rank 0 that calls, and ends as a Python program does; then the ranks go on. All ranks
    drop symmetric memory that the child keeps."""
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
                result = {"call": tried, "looked": looked, "kept": float(kept.sum())}
                os.write(writer, json.dumps(result).encode())
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
    """Exchanges messages between two ranks, threads of one process. Rank 0, in place, may not allocate the
    memory that it needs."""
    zero, one = unisono.init_threads(2, timeout_s=30)
    x, y, z = (np.ones(64 << 20, np.uint8) for _ in range(3))
    results: dict[str, Any] = {}

    def rank_1() -> None:
        results["peer"] = attempt(lambda: one.send_recv(y, 0, z, 0))

    peer = threading.Thread(target=rank_1)
    peer.start()
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), before[1]))
    results["first"] = attempt(lambda: zero.send_recv(x, 1, x, 1))
    resource.setrlimit(resource.RLIMIT_AS, before)
    peer.join()
    return results | {"closed": zero.closed, "again": attempt(zero.barrier)}


def interrupted() -> dict[str, Any]:
    """Sends Ctrl-C to rank 0 while it waits for rank 1. Rank 1 then waits for rank 0."""
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
    """Closes rank 0 while a thread of its own waits for rank 1. Rank 1 then waits for rank 0."""
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
        meeting.tell()  # stays alive until rank 1 has its error
        return {"first": first}
    meeting.tell()
    first = attempt(comm.barrier)
    meeting.tell()
    return {"first": first}


def handler_raises() -> dict[str, Any]:
    """Raises from a signal handler of the program while a call waits."""

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
    """Sends a signal, whose handler returns, to rank 0 while it waits. The wait goes on."""
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
    """Stops rank 0 for longer than its deadline while it waits, as a paused machine does."""
    comm = init_in_peace(4)
    pids = Meeting().tell(os.getpid())
    if comm.rank == 1:
        _wait_for_sleep(pids[0])
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(5)
        os.kill(pids[0], signal.SIGCONT)
        time.sleep(0.1)  # rank 0 waits on, and looks at the clock
    return float(comm.all_reduce(np.ones(1, FLOATS))[0])


def without_the_gil() -> dict[str, Any]:
    """Makes a call with a deadline of 1 s, while another thread keeps the GIL for 0.9 s at a time."""
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
    """Calls all_reduce on all ranks, on rank 1 with another count."""
    comm = unisono.init(timeout_s=20, check=True)
    comm.all_reduce(np.ones(4 + (comm.rank == 1), FLOATS))


def direct_without_reach() -> dict[str, Any]:
    """Asks for the direct algorithm on plain memory."""
    comm = unisono.init(timeout_s=20)
    x = np.ones(4, FLOATS)
    first = attempt(lambda: comm.all_reduce(x, algorithm="two_shot_direct"))
    return {"first": first, "sum": float(comm.all_reduce(x)[0])}


def checks_on_rank_0() -> None:
    """Asks only rank 0 to compare calls."""
    rank = launch.from_env(os.environ).rank
    unisono.init(timeout_s=30, check=rank == 0)
