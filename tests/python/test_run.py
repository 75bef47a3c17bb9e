"""`unisono run` with real processes.

The end of standard output proves that no process of the run is left: every rank, and every process that it
has started, holds the pipe open as long as it lives.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ranks
from unisono import launch
from unisono.errors import UsageError
from unisono.launch import run as run_module

pytestmark = pytest.mark.timeout(60)
MEET = """
import os, signal, subprocess, sys, time
from unisono import bootstrap, errors, launch
rank = int(os.environ["UNISONO_RANK"])
b = bootstrap.make(launch.from_env(os.environ), timeout_s=50)
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
FOREIGN = dict.fromkeys(
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK", "PMI_FD", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess"], "3"
)


@pytest.fixture
def nothing_left(ranks_find_unisono: None) -> Iterator[None]:
    """Checks that the run leaves this process no child, no open file and no signal handler."""
    handlers = [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
    ]
    gc.collect()  # objects of earlier tests
    files, children = _files(), _children()
    yield
    assert (_files(), _children()) == (files, children)
    assert handlers == [
        signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
    ]


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _children() -> str:
    found = ""
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ends
            found += path.read_text()
    return found


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", MEET + code]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_rank_meets_the_others(n: int, nothing_left: None, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
lengths = b.all_gather(bytes(rank)) == [bytes(i) for i in range(b.size)]
say(b.rank, b.size, lengths, b.all_gather(b"r%d" % rank))
"""
    assert launch.run_local(n, _python(code)) == 0
    everyone = [b"r%d" % rank for rank in range(n)]
    assert sorted(capfd.readouterr().out.splitlines()) == [f"{rank} {n} True {everyone}" for rank in range(n)]


def test_a_killed_rank_is_named_to_the_others_and_the_user(
    nothing_left: None, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
b.all_gather(b"")
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    b.all_gather(b"")
except errors.PeerLostError as error:
    say(error)
    sys.exit(1)
"""
    assert launch.run_local(4, _python(code)) == 128 + signal.SIGKILL
    out, err = capfd.readouterr()
    assert out.count("rank 2 was killed by SIGKILL, while rank") == 3, out
    assert err.splitlines()[0].startswith("unisono run: rank 2 was killed by SIGKILL")


def test_a_rank_that_exits_early_is_named(
    nothing_left: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_CLOSED_S", 30)
    code = """
if rank == 1:
    sys.exit(0)
try:
    b.all_gather(b"")
except errors.PeerLostError as error:
    say(error)
    sys.exit(4)
"""
    assert launch.run_local(3, _python(code)) == 4
    out, err = capfd.readouterr()
    assert out.count("rank 1 exited with status 0") == 2, out
    assert "exited with status 4" in err


def test_a_rank_that_closes_its_socket_is_named(
    nothing_left: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_CLOSED_S", 0.05)
    code = """
if rank == 1:
    os.close(int(os.environ["UNISONO_BOOTSTRAP_FD"]))
    sys.stdin.read()
    signal.pause()
try:
    b.all_gather(b"")
except errors.PeerLostError as error:
    say(error)
    sys.exit(4)
"""
    assert launch.run_local(2, _python(code), grace_s=0.05) == 4
    text = "rank 1 closed its connection to the launcher, while rank 0 waited in an all_gather\n"
    assert capfd.readouterr().out == text


def test_bytes_that_a_rank_sent_before_its_end_count(
    nothing_left: None, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
from unisono.bootstrap import hub
b.all_gather(b"")
if rank == 1:
    last = hub.encode(hub.Kind.DATA, 1, (0, 1), b"last words", 9000)
    os.write(int(os.environ["UNISONO_BOOTSTRAP_FD"]), last)
else:
    say(b.all_gather(b""))
"""
    assert launch.run_local(2, _python(code)) == 0
    assert capfd.readouterr().out == "[b'', b'last words']\n"


def test_ranks_that_ignore_the_failure_are_ended(
    nothing_left: None, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
signal.signal(signal.SIGTERM, lambda *_: say("asked to end"))
b.all_gather(b"")
if rank == 0:
    sys.exit(7)
while True:
    time.sleep(0.01)
"""
    assert launch.run_local(2, _python(code), grace_s=0.2, kill_s=2) == 7
    out, err = capfd.readouterr()
    assert out == "asked to end\n"
    assert err == "unisono run: rank 0 exited with status 7; the 1 still running have 0.2 s to end\n"


def test_hostile_bytes_from_a_rank_are_an_error_that_names_it(
    nothing_left: None, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
if rank == 1:
    os.write(int(os.environ["UNISONO_BOOTSTRAP_FD"]), os.urandom(100000))
try:
    b.all_gather(b"")
except errors.UnisonoError as error:
    say(type(error).__name__, error)
"""
    assert launch.run_local(3, _python(code)) == 0
    out = capfd.readouterr().out
    assert out.count("UnisonoError rank 1 sent the launcher bytes that are no Unisono message") == 3, out


def test_variables_of_another_launcher_do_not_reach_the_ranks(
    nothing_left: None, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"say(sorted(set(os.environ) & {set(FOREIGN) | {'KEPT'}}))"
    env = {**os.environ, **FOREIGN, "KEPT": "1", "UNISONO_RANK": "9"}
    assert launch.run_local(1, _python(code), env=env) == 0
    assert capfd.readouterr().out == "['KEPT']\n"


def test_run_works_from_a_thread_and_without_pidfd(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    codes: list[int] = []
    argv = _python("say(len(b.all_gather(b'')))\nif rank == 1: os.kill(os.getpid(), 9)")
    thread = threading.Thread(target=lambda: codes.append(launch.run_local(2, argv)))
    thread.start()
    thread.join()
    assert codes == [137]
    assert capfd.readouterr().out == "2\n2\n"


def test_processes_that_a_rank_started_end_with_the_run(nothing_left: None) -> None:
    code = "subprocess.Popen(['sleep', '1000']); b.all_gather(b'')"
    with _launcher(2, code) as run:
        out, _ = run.communicate()  # returns when the sleeps are gone as well
    assert (run.returncode, out) == (0, "")


def test_bad_calls(nothing_left: None, tmp_path: Path) -> None:
    for n in (0, -1, 1 << 20):
        with pytest.raises(UsageError, match=f"number of ranks is {n}"):
            launch.run_local(n, ["true"])
    with pytest.raises(UsageError, match="argv is empty"):
        launch.run_local(1, [])
    with pytest.raises(UsageError, match=r"train\.py"):
        launch.run_command(1, [])
    with pytest.raises(UsageError, match="name of a module"):
        launch.run_command(1, ["-m"])
    with pytest.raises(UsageError, match=r"cannot start 'no-such-program'.*No such file"):
        launch.run_local(3, ["no-such-program"])
    (tmp_path / "no-such-program").mkdir()  # the search of PATH gives "Permission denied"
    with pytest.raises(UsageError, match=r"cannot start 'no-such-program'.*No such file"):
        launch.run_local(3, ["no-such-program"], env={**os.environ, "PATH": f"{tmp_path}:/usr/bin"})
    with pytest.raises(UsageError, match=r"cannot start.*Permission denied"):
        launch.run_local(3, [str(tmp_path)])
    with pytest.raises(UsageError, match="null byte"):
        launch.run_local(3, ["a\0b"])


def test_run_command_runs_scripts_and_modules(
    nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['UNISONO_SIZE'])\n")
    monkeypatch.chdir(tmp_path)
    assert launch.run_command(1, [str(script), "--lr", "1"]) == 0
    assert launch.run_command(1, ["-m", "train", "x"]) == 0
    assert launch.run_command(2, ["sh", "-c", "exit 3"]) == 3
    assert capfd.readouterr().out == "['--lr', '1'] 1\n['x'] 1\n"


@contextlib.contextmanager
def _launcher(n: int, code: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a launcher in a process of its own, as a shell would, with an open standard input."""
    start = (
        "import signal, sys; from unisono import launch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a run in the background ignores them
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"sys.exit(launch.run_local({n}, [sys.executable, '-c', sys.argv[1]]))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", start, MEET + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


def _lines(run: subprocess.Popen[str], count: int) -> list[str]:
    assert run.stdout is not None
    return sorted(run.stdout.readline().strip() for _ in range(count))


# A handler, not a blocked signal, which a thread of numpy's would get.
CATCH = """
caught = []
signal.signal(signal.SIGINT, lambda *_: caught.append(rank))
say("ready")
while not caught: time.sleep(0.01)
say("caught", rank)
"""


def test_an_interrupt_reaches_each_rank_once(nothing_left: None) -> None:
    code = CATCH + "b.all_gather(b'')\nsay('saved', len(caught))"
    with _launcher(3, code) as run:
        _lines(run, 3)
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate()
    assert sorted(out.splitlines()) == ["caught 0", "caught 1", "caught 2", *["saved 1"] * 3]
    assert run.returncode == 0


def test_a_second_interrupt_ends_the_run(nothing_left: None) -> None:
    with _launcher(2, CATCH + "time.sleep(60)") as run:
        _lines(run, 2)
        run.send_signal(signal.SIGINT)
        assert _lines(run, 2) == ["caught 0", "caught 1"]
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate()
    assert (out, run.returncode) == ("", 128 + signal.SIGTERM)


def test_an_interrupt_without_a_handler_ends_the_run(nothing_left: None) -> None:
    with _launcher(2, "signal.signal(signal.SIGINT, signal.SIG_DFL)\nsay('ready')\nsignal.pause()") as run:
        _lines(run, 2)
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate()
    assert (out, run.returncode) == ("", 128 + signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_are_passed_on(nothing_left: None, number: signal.Signals) -> None:
    with _launcher(2, "say('ready')\nsignal.pause()") as run:
        _lines(run, 2)
        run.send_signal(number)
        out, _ = run.communicate()
    assert (out, run.returncode) == ("", 128 + number)


def test_a_killed_launcher_takes_its_ranks_along(nothing_left: None) -> None:
    with _launcher(3, "say('ready')\nsignal.pause()") as run:
        _lines(run, 3)
        run.kill()
        out, _ = run.communicate()  # returns when the ranks are gone
    assert (out, run.returncode) == ("", -signal.SIGKILL)


def test_a_stopped_launcher_stops_its_ranks(nothing_left: None) -> None:
    """The stopped time, longer than the deadline here, does not count as a wait."""
    code = """
bootstrap.client._ANSWER_GRACE_S = 0
b = bootstrap.make(launch.from_env(os.environ), timeout_s=2)
say(os.getpid())
if rank == 0: sys.stdin.read()
b.all_gather(b'')
say('done')
"""
    with _launcher(2, code) as run:
        pids = _lines(run, 2)
        for pid in pids:
            ranks.wait_for_state(int(pid), "S")  # rank 1 waits for rank 0, who reads
        run.send_signal(signal.SIGTSTP)
        os.waitid(os.P_PID, run.pid, os.WSTOPPED)
        for pid in pids:
            ranks.wait_for_state(int(pid), "T")
        time.sleep(2.5)
        run.send_signal(signal.SIGCONT)
        out, _ = run.communicate("")  # ends rank 0's input
    assert (out, run.returncode) == ("done\ndone\n", 0)


def test_rank_0_reads_standard_input(nothing_left: None) -> None:
    with _launcher(3, "say(rank, repr(sys.stdin.read()))") as run:
        out, _ = run.communicate("words")
    assert sorted(out.splitlines()) == ["0 'words'", "1 ''", "2 ''"]


def test_two_runs_at_once_do_not_meet(nothing_left: None) -> None:
    code = "say(b.all_gather(sys.stdin.read().encode() if rank == 0 else b''))"
    with _launcher(2, code) as one, _launcher(2, code) as two:
        out_one, _ = one.communicate("one")
        out_two, _ = two.communicate("two")
    assert out_one.splitlines() == ["[b'one', b'']"] * 2
    assert out_two.splitlines() == ["[b'two', b'']"] * 2
    assert (one.returncode, two.returncode) == (0, 0)
