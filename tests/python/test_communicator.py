"""The communicator itself: its start, its ranks, the calls between pairs, and its end."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import fabric
import ranks
import threads
import unisono

F32 = np.float32
CALLS = (
    "all_gather all_reduce all_to_all all_to_all_v barrier batch_send_recv broadcast empty gather recv reduce"
    " reduce_scatter register scatter send send_recv"
).split()


def play(n: int, program: str, *args: object, **more: Any) -> list[Any]:
    return ranks.play(n, f"basic_programs:{program}", *args, **more).results()


# ---- rank and size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_init_under_the_launcher(n: int) -> None:
    sums = [n * (n - 1) // 2, n]
    assert play(n, "who") == [[rank, n, sums, False] for rank in range(n)]


def test_init_alone() -> None:
    with unisono.init() as comm:
        assert (comm.rank, comm.size) == (0, 1)
    with unisono.init(rank=0, size=1) as comm:
        assert (comm.rank, comm.size) == (0, 1)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_init_threads(n: int) -> None:
    with threads.team(n) as comms:
        assert [(comm.rank, comm.size) for comm in comms] == [(rank, n) for rank in range(n)]
        assert (
            threads.together(comms, lambda c: int(c.all_reduce(np.int64(c.rank)))) == [n * (n - 1) // 2] * n
        )


@pytest.mark.parametrize("n", [0, -1, 1025])
def test_init_of_a_wrong_number_of_threads(n: int) -> None:
    with pytest.raises(unisono.UsageError):
        unisono.init_threads(n)


@pytest.mark.parametrize(("rank", "size"), [(0.5, 1), ("0", 1), (0, 1.0), (0, None)])
def test_a_rank_that_is_no_number(rank: Any, size: Any) -> None:
    with pytest.raises(unisono.UsageError):
        unisono.init(rank, size)


def test_ranks_that_are_threads_and_meet_in_python() -> None:
    """Each rank waits for the others, which need the interpreter meanwhile."""
    meeting, brought = threading.Barrier(2), {}

    class Bootstrap:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, 2

        def all_gather(self, data: bytes) -> list[bytes]:
            brought[self.rank] = data
            meeting.wait(20)
            both = [brought[0], brought[1]]
            meeting.wait(20)
            return both

        def close(self) -> None:
            raise AssertionError("it is the caller's own")

    def body(rank: int) -> float:
        with unisono.init(bootstrap=Bootstrap(rank), timeout_s=20) as comm:
            return float(comm.all_reduce(np.ones(1, F32))[0])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, range(2))) == [2, 2]


@pytest.mark.parametrize("timeout_s", [0, -1, 8e9, "soon", float("nan"), float("inf")])
def test_wrong_deadline(timeout_s: Any) -> None:
    with pytest.raises(unisono.UsageError, match="timeout_s"):
        unisono.init(timeout_s=timeout_s)
    with pytest.raises(unisono.UsageError, match="timeout_s"):
        unisono.init_threads(2, timeout_s=timeout_s)


def test_deadline_of_the_environment() -> None:
    zero, _ = play(2, "deadline_of_the_environment", env={"UNISONO_TIMEOUT_S": "2"})
    assert zero["tried"]["error"]["type"] == "TimeoutError"
    assert "has waited 2 s" in zero["tried"]["error"]["text"]
    assert 2 <= zero["waited"] < 6.75


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UNISONO_TIMEOUT_S", "soon"),
        ("UNISONO_TIMEOUT_S", "-3"),
        ("UNISONO_TIMEOUT_S", "inf"),
        ("UNISONO_CHUNK_BYTES", "64K"),
        ("UNISONO_CHUNK_BYTES", "2147483648"),
        ("UNISONO_STREAM_BYTES", "-1"),
        ("UNISONO_SPINS", "many"),
        ("UNISONO_SPINS", "1.7"),
        ("UNISONO_SPINS", "3000000000"),
        ("UNISONO_ISA", "mmx"),
        ("UNISONO_PLAN", "/nowhere/plan.json"),
    ],
)
def test_variable_without_sense(name: str, value: str) -> None:
    errors = ranks.play(1, "basic_programs:who", env={name: value}).errors()
    assert errors[0]["type"] == "UsageError"
    assert name in errors[0]["text"] and value in errors[0]["text"]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("name", "value"), [("UNISONO_FAR", "no"), ("UNISONO_CHECK", "2")])
def test_flag_that_is_neither(name: str, value: str, nodes: int) -> None:
    for error in ranks.play(nodes, "basic_programs:who", env={name: value}, nodes=nodes).errors():
        assert error["type"] == "UsageError"
        assert error["text"] == f"{name}={value} is neither 0 nor 1: set 0 to turn it off, 1 to turn it on."


def test_several_communicators() -> None:
    expected = [0.0] * 4
    for turn in range(40):
        index = turn * 3 % 4
        expected[index] += 2 * (turn + index)
    expected[1] += 2
    expected[3] += 2
    assert play(2, "several") == [expected] * 2


def test_barrier_holds() -> None:
    assert play(3, "barrier_holds") == [[True] * 3] * 3


# ---- pairs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", ["0", "1"])
def test_sends_before_receives(far: str) -> None:
    assert play(2, "sends_before_receives", env={"UNISONO_FAR": far}) == [True, True]


@pytest.mark.parametrize("algorithm", [None, "push_packets", "push", "direct"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_rings(n: int, algorithm: str | None) -> None:
    assert all(play(n, "rings", algorithm))


@pytest.mark.parametrize(("n", "nodes"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (5, 3)])
def test_batches(n: int, nodes: int) -> None:
    env = fabric.between_nodes() if n > 2 else {}  # two ranks on two nodes: by gloo
    assert play(n, "batches", nodes=nodes, env=env) == [[]] * n


def test_batches_unchecked() -> None:
    assert play(3, "batches", env={"UNISONO_CHECK": "0"}) == [[]] * 3


def test_ends_of_a_pair_need_not_call_alike() -> None:
    """A send may meet a send_recv, and a send_recv a recv."""

    def body(comm: unisono.Communicator) -> Any:
        if comm.rank == 0:
            comm.send(np.full(50_000, 5, F32), 1)
            return comm.recv(np.empty(50_000, F32), 2)[0]
        if comm.rank == 1:
            return comm.send_recv(np.full(50_000, 6, F32), 2, None, 0)[0]
        got = comm.recv(np.empty(50_000, F32), 1)
        comm.send(got + 1, 0)
        return got[0]

    assert threads.with_threads(3, body) == [7, 5, 6]


@pytest.mark.parametrize("algorithm", ["direct", "push"])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_echo(algorithm: str, in_place: bool) -> None:
    """A rank that receives, then sends, meets one that does both at once."""

    def body(comm: unisono.Communicator) -> Any:
        comm.check = False  # a check would wait for both halves before either moves
        x, got = np.full(300_000, comm.rank + 1, F32), np.zeros(300_000, F32)
        if comm.rank == 0:
            return comm.send_recv(x, 1, x if in_place else got, 1, algorithm=algorithm).sum()
        comm.recv(got, 0, algorithm=algorithm)
        comm.send(got + x, 0, algorithm=algorithm)
        return got.sum()

    assert threads.with_threads(2, body) == [900_000, 300_000]


def test_scatter_into_out_alone() -> None:
    def body(comm: unisono.Communicator) -> Any:
        x = np.arange(6, dtype=F32).reshape(3, 2) if comm.rank == 1 else None
        return comm.scatter(x, root=1, out=np.empty(2, F32)).tolist()

    assert threads.with_threads(3, body) == [[0, 1], [2, 3], [4, 5]]


def test_calls_of_a_failed_pair_do_not_touch_others() -> None:
    """A rank outside a pair goes on while the pair exchanges messages."""

    def body(comm: unisono.Communicator) -> float:
        total = 0.0
        for turn in range(100):
            first, second = turn % 3, (turn + 1) % 3
            if comm.rank == first:
                comm.send(np.full(2000, turn, F32), second)
            elif comm.rank == second:
                total += float(comm.recv(np.empty(2000, F32), first)[-1])
        return float(comm.all_reduce(np.array([total]))[0])

    assert threads.with_threads(3, body) == [sum(range(100))] * 3


# ---- one thread at a time ---------------------------------------------------------------------------------


def test_two_threads_in_one_communicator() -> None:
    """A call of another thread waits for its turn."""
    with threads.team(2, check=True) as comms:
        got = np.zeros(4, F32)
        first = comms[0].recv(got, 1, asynchronous=True)
        sums = []
        second = threading.Thread(target=lambda: sums.append(comms[0].all_reduce(np.ones(1, F32))))
        second.start()
        comms[1].send(np.full(4, 3, F32), 0)
        assert comms[1].all_reduce(np.ones(1, F32)) == [2]
        second.join(10)
        assert not second.is_alive()
        assert first.done
        assert first.wait() is got
        assert (got == 3).all()
        assert sums == [2]


def test_close_ends_the_wait_of_another_thread() -> None:
    """The thread may not be in its call yet: then the communicator is closed, and another one is tried."""
    for _ in range(100):
        with threads.team(2) as comms:
            errors: list[str] = []

            def wait(comm: unisono.Communicator = comms[0], errors: list[str] = errors) -> None:
                try:
                    comm.barrier()
                except unisono.UsageError as error:
                    errors.append(str(error))

            waiting = threading.Thread(target=wait)
            waiting.start()
            waiting.join(0.02)
            comms[0].close()
            waiting.join(10)
            assert not waiting.is_alive()
            if "was closed by another thread while it waited in barrier" in errors[0]:
                return
            assert "the communicator is closed" in errors[0]
    raise AssertionError("the thread never waited")


def test_calls_release_the_interpreter() -> None:
    """A thread that waits in a call lets others run, here the one for which it waits."""
    with threads.team(2) as comms:
        order: list[str] = []

        def late(comm: unisono.Communicator) -> None:
            if comm.rank == 1:
                threading.Event().wait(0.1)
                order.append("late")
            comm.barrier()
            order.append("done")

        threads.together(comms, late)
    assert order == ["late", "done", "done"]


def test_ranks_that_are_processes_release_the_interpreter() -> None:
    """A small call keeps the GIL only while it polls."""
    assert play(2, "other_threads_run") == [2, 2]


# ---- the end ----------------------------------------------------------------------------------------------


def arguments(call: str) -> tuple[Any, ...]:
    one, row = np.ones(2, F32), np.ones((1, 2), F32)
    return {
        "barrier": (),
        "empty": (3,),
        "send": (one, 0),
        "recv": (one, 0),
        "send_recv": (one, 0, None, 0),
        "batch_send_recv": ([(one, 0)], [(one.copy(), 0)]),
        "all_to_all_v": (one, [2], [2]),
        **dict.fromkeys(("reduce_scatter", "scatter", "all_to_all"), (row,)),
    }.get(call, (one,))


@pytest.mark.parametrize("call", CALLS)
def test_closed(call: str) -> None:
    comm = unisono.init()
    assert not comm.closed
    comm.close()
    comm.close()
    assert comm.closed
    assert (comm.rank, comm.size) == (0, 1)
    with pytest.raises(unisono.UsageError) as caught:
        getattr(comm, call)(*arguments(call))
    if call not in ("send", "recv"):  # with one rank, these are wrong anyway
        assert "the communicator is closed: make a new one" in str(caught.value)


def test_context_manager() -> None:
    with unisono.init() as comm:
        assert not comm.closed
    assert comm.closed
    with pytest.raises(KeyError), unisono.init() as comm:
        raise KeyError
    assert comm.closed


def test_dropped_communicator_leaves() -> None:
    comms = unisono.init_threads(2, timeout_s=10)
    gone = weakref.ref(comms[1])
    comms.pop()
    assert gone() is None
    with pytest.raises(unisono.PeerLostError, match=r"rank 1 .* has closed its communicator"):
        comms[0].barrier()
    comms[0].close()


def test_memory_that_another_library_holds_prints_nothing_at_exit() -> None:
    program = "import ctypes, unisono; comm = unisono.init(); comm.barrier(); "
    program += "ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))"
    ended = ranks.run([sys.executable, "-c", program])
    assert (ended.code, ended.output) == (0, "")


# ---- what a reader sees -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_large_gathers(n: int) -> None:
    assert play(n, "large_gathers") == [[]] * n


def test_every_call_has_a_docstring() -> None:
    members = {name for name, _ in inspect.getmembers(unisono.Communicator) if not name.startswith("_")}
    assert set(CALLS) < members
    for name in members:
        assert (getattr(unisono.Communicator, name).__doc__ or "").strip(), name
    assert "f8e4m3" in (unisono.Communicator.__doc__ or "")


def test_errors_are_also_built_in_ones() -> None:
    import builtins

    assert issubclass(unisono.UsageError, ValueError)
    assert issubclass(unisono.TimeoutError, builtins.TimeoutError)
    assert issubclass(unisono.PeerLostError, ConnectionError)
    assert issubclass(unisono.ResourceError, OSError)
    for name in ("UsageError", "TimeoutError", "PeerLostError", "ResourceError", "MismatchError"):
        assert issubclass(getattr(unisono, name), unisono.UnisonoError)


def test_exports() -> None:
    assert unisono.__version__
    for name in unisono.__all__:
        assert hasattr(unisono, name)
