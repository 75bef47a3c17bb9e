"""The plan: the algorithm of a call, by the built-in table, by a user's table, and by name."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ranks
import report_data
import threads
import unisono
from unisono.bench import tune
from unisono.cli import finish
from unisono.cli.app import app
from unisono.tables import MOST_BYTES, Tables, name_of, read

F32 = np.float32
MOVING = (
    "reduce broadcast all_gather gather reduce_scatter scatter all_to_all all_to_all_v send recv send_recv"
).split()
SIZES = [1 << power for power in range(32)]


def test_names() -> None:
    names = unisono.Communicator.algorithms
    assert names("all_reduce") == [
        *("one_shot_packets", "one_shot", "two_shot_packets", "two_shot", "reduce_scatter_all_gather"),
        *("two_shot_push", "two_shot_direct"),
    ]
    assert names("broadcast") == ["push_packets", "push", "chain", "scatter_all_gather", "direct"]
    assert names("reduce", "cuda") == [
        *("push_packets", "push", "two_shot_push", "direct", "two_shot_ll128", "push_ll128", "copy_engine")
    ]
    for collective in MOVING:
        assert {"push_packets", "push", "direct"} <= set(names(collective))
    assert names("barrier") == names("empty") == []


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_built_in_plan(n: int, symmetric: bool) -> None:
    """Every size has an algorithm of its collective: packets for the least, a direct one for the largest."""
    with threads.team(n) as comms:
        for collective in ("all_reduce", *MOVING):
            chosen = [comms[0].plan(collective, size, symmetric) for size in SIZES]
            assert set(chosen) <= set(comms[0].algorithms(collective))
            assert chosen[0].endswith("packets")
            assert chosen[-1].endswith("direct")
            changes = sum(first != second for first, second in pairwise(chosen))
            assert changes <= 4, chosen
            assert all(
                comm.plan(collective, 5000, symmetric) == comms[0].plan(collective, 5000, symmetric)
                for comm in comms
            )


def test_set_plan() -> None:
    with threads.team(2) as comms:
        table: Any = [
            ("all_reduce", False, 1000, "two_shot"),
            ("all_reduce", False, None, "reduce_scatter_all_gather"),
            ("broadcast", True, 64, "push"),
        ]
        before = comms[0].plan("all_reduce", 8, True), comms[0].plan("broadcast", 8, False)
        for comm in comms:
            comm.set_plan(table)
        comm = comms[0]
        assert [comm.plan("all_reduce", size) for size in (1, 1000, 1001, 1 << 40)] == [
            *("two_shot", "two_shot"),
            *("reduce_scatter_all_gather", "reduce_scatter_all_gather"),
        ]
        assert (comm.plan("all_reduce", 8, True), comm.plan("broadcast", 8, False)) == before
        assert comm.plan("broadcast", 64, True) == "push"
        assert comm.plan("broadcast", 65, True) in comm.algorithms("broadcast")
        for count in (1, 250, 251, 100_000):
            sums = threads.together(comms, lambda c, count=count: c.all_reduce(np.ones(count, F32)).sum())
            assert sums == [2 * count] * 2


def test_plans_in_place() -> None:
    """No plan in place has an algorithm with which a peer would overwrite unsent data."""
    with threads.team(2) as comms:
        for collective, in_place in (("all_to_all", "push"), ("all_to_all_v", "push"), ("gather", "direct")):
            assert comms[0].plan(collective, 1 << 30, True) == "direct"
            assert comms[0].plan(collective, 1 << 30, True, in_place=True) == in_place


def test_set_plan_of_a_pair() -> None:
    """send, recv and send_recv have one plan, since both ends run one program."""
    with unisono.init() as comm:
        for name in ("send", "recv", "send_recv"):
            for algorithm in ("push_packets", "push"):
                comm.set_plan([(name, False, None, algorithm)])
                assert [comm.plan(end, 1 << 20) for end in ("send", "recv", "send_recv")] == [algorithm] * 3


def test_unknown_device() -> None:
    for call in (
        lambda: unisono.Communicator.algorithms("all_reduce", "gpu"),
        lambda: unisono.init().plan("all_reduce", 8, device="gpu"),
    ):
        with pytest.raises(unisono.UsageError, match="device='gpu' is unknown: use cpu or cuda"):
            call()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (("all_reduce", False, 8, "ring"), "'ring', which does not exist"),
        (("all_reduce", False, 8, "push"), "all_reduce the algorithm push, which it cannot run"),
        (("all_gather", True, 8, "two_shot"), "all_gather the algorithm two_shot"),
        (("barrier", False, 8, "push"), "barrier the algorithm push"),
        (("all_scatter", False, 8, "push"), "no collective 'all_scatter'"),
        (("reduce", False, 8, "push", (2, 48, 0)), "2 blocks of 48 threads"),
    ],
)
def test_table_that_does_not_fit(entry: Any, words: str) -> None:
    with unisono.init() as comm:
        before = comm.plan("all_reduce", 8)
        with pytest.raises(unisono.UsageError) as caught:
            comm.set_plan([entry])
        assert words in str(caught.value)
        assert comm.plan("all_reduce", 8) == before


@pytest.mark.parametrize("collective", ["all_reduce", *MOVING[:8], "send_recv"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_algorithm_runs_by_name(n: int, collective: str) -> None:
    def body(comm: unisono.Communicator) -> None:
        x, row = np.full(100, comm.rank, F32), np.full((n, 50), comm.rank, F32)
        right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
        for name in comm.algorithms(collective):
            if collective == "all_to_all_v":
                got = comm.all_to_all_v(row.reshape(-1), [50] * n, [50] * n, algorithm=name).reshape(n, 50)
            elif collective == "send_recv":
                got = comm.send_recv(x, right, None, left, algorithm=name)
            elif collective in ("reduce_scatter", "scatter", "all_to_all"):
                got = getattr(comm, collective)(row, algorithm=name)
            else:
                got = getattr(comm, collective)(x, algorithm=name)
            total = n * (n - 1) / 2
            everyone = np.arange(n, dtype=F32)
            expected: Any = {
                "send_recv": left,
                "scatter": 0,
                "broadcast": 0,
                "all_to_all": everyone[:, None],
                "all_to_all_v": everyone[:, None],
                "all_gather": everyone[:, None],
                "gather": everyone[:, None],
            }.get(collective, total)
            assert got is None or (got == expected).all(), name
            x[:] = comm.rank

    threads.with_threads(n, body)


# ---- the kernel's copies ----------------------------------------------------------------------------------


def test_kernel_copies_are_the_same_on_every_rank() -> None:
    first, *others = ranks.play(3, "basic_programs:kernel_copies").results()
    assert first in (["fast", "fast"], ["slow", "slow"], ["none", "none"])
    assert others == [first, first]


def test_kernel_copies_that_are_not_allowed_are_none() -> None:
    outcome = ranks.play(2, "basic_programs:kernel_copies", env={"UNISONO_FAR": "0"})
    assert outcome.results() == [["none", "none"]] * 2


def test_threads_of_one_process_have_no_kernel_copies() -> None:
    assert threads.with_threads(2, lambda comm: comm.kernel_copies) == ["none", "none"]


# ---- the file that `unisono tune` writes ------------------------------------------------------------------


def table(n: int) -> dict[str, Any]:
    entry = {"collective": "all_reduce", "memory": "plain", "up_to_bytes": None, "algorithm": "two_shot"}
    return {"ranks": n, "entries": [entry]}


def planned(env: dict[str, str], n: int = 2) -> list[Any]:
    """Returns the ranks' algorithms of an all_reduce of 8 bytes, or their errors."""
    outcome = ranks.play(n, "basic_programs:planned", env=env)
    return [answer.get("result") or answer["error"] for answer in outcome.ranks]


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([table(3), table(2)]))
    assert planned({"UNISONO_PLAN": str(path)}) == ["two_shot"] * 2
    path.write_text(json.dumps(table(2)))
    assert planned({"UNISONO_PLAN": str(path)}) == ["two_shot"] * 2
    path.write_text(json.dumps([table(3)]))
    assert planned({"UNISONO_PLAN": str(path)}) == ["one_shot_packets"] * 2


def test_info_and_records_tell_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNISONO_PLAN")
    assert Tables.find().in_words() == f"built in; `unisono tune` writes {tmp_path}/unisono/plan.json"
    path = tmp_path / "unisono" / "plan.json"
    path.parent.mkdir()
    for tables, text, taken in (
        ([table(3)], "for 3 ranks on CPUs; else built in", False),
        ([table(3), table(1)], "for 3 ranks on CPUs, 1 ranks on CPUs; else built in", True),
    ):
        path.write_text(json.dumps(tables))
        assert Tables.find().in_words() == f"{path}, {text}"
        with unisono.init() as comm:
            assert (name_of(comm) is not None) == taken
    path.write_text("{")
    assert "is not a plan table that can be read" in Tables.find().in_words()
    monkeypatch.setenv("UNISONO_PLAN", str(tmp_path / "none"))
    assert "is not a file" in Tables.find().in_words()


def test_the_file_of_rank_0_is_for_all(tmp_path: Path) -> None:
    """Plans that differ would give wrong sums."""
    paths = [tmp_path / name for name in ("zero.json", "one.json", "none.json")]
    paths[0].write_text(json.dumps(table(3)))
    paths[1].write_text(json.dumps(table(3)).replace("two_shot", "one_shot"))
    assert ranks.play(3, "basic_programs:planned", list(map(str, paths))).results() == ["two_shot"] * 3
    errors = ranks.play(3, "basic_programs:planned", list(map(str, reversed(paths)))).errors()
    assert {error["type"] for error in errors} == {"UsageError"}
    assert len({error["text"] for error in errors}) == 1 and "none.json" in errors[0]["text"]


def test_a_file_for_gpus_is_not_for_the_host(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([table(2), table(2) | {"device": "cuda", "card": "one", "entries": [{}]}]))
    assert planned({"UNISONO_PLAN": str(path)}) == ["two_shot"] * 2


def test_file_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "unisono").mkdir()
    (tmp_path / "unisono" / "plan.json").write_text(json.dumps(table(2)))
    assert planned({"UNISONO_PLAN": "", "XDG_CACHE_HOME": str(tmp_path)}) == ["two_shot"] * 2
    assert planned({"UNISONO_PLAN": "", "XDG_CACHE_HOME": str(tmp_path / "none")}) == ["one_shot_packets"] * 2


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "5", "null", "{}", "[[]]", '{"ranks": 1}', '{"ranks": 1, "entries": [{}]}'),
        json.dumps({"ranks": 1, "entries": [{**table(1)["entries"][0], "algorithm": "ring"}]}),
        json.dumps({"ranks": 1, "entries": [{**table(1)["entries"][0], "collective": 7}]}),
        json.dumps({"ranks": 1, "entries": [{**table(1)["entries"][0], "up_to_bytes": -1}]}),
        json.dumps({"ranks": 1, "entries": [{**table(1)["entries"][0], "up_to_bytes": "8K"}]}),
    ],
)
def test_file_that_is_no_table(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    monkeypatch.setenv("UNISONO_PLAN", str(path))
    with pytest.raises(unisono.UsageError):
        unisono.init()
    with pytest.raises(unisono.UsageError):
        unisono.init_threads(1)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "UNISONO_PLAN"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with unisono.init() as comm:
        assert comm.plan("all_reduce", 8) in comm.algorithms("all_reduce")
    done = CliRunner().invoke(app, ["tune"])
    assert done.exit_code == finish.USAGE and "--output" in done.stderr


def test_a_table_of_many_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("[" * 100_000)
    monkeypatch.setenv("UNISONO_PLAN", str(path))
    with pytest.raises(unisono.UsageError, match="is not a plan table"):
        unisono.init()


def test_the_largest_file_is_taken_and_a_larger_one_is_named(tmp_path: Path) -> None:
    """A file of any size is refused quickly: 8 GiB are not read while the others wait for rank 0."""
    most, more, huge = (tmp_path / name for name in ("most.json", "more.json", "huge.json"))
    text = json.dumps(table(2))
    most.write_text(text.ljust(MOST_BYTES))
    assert planned({"UNISONO_PLAN": str(most)}) == ["two_shot"] * 2
    more.write_text(text.ljust(MOST_BYTES + 1))
    huge.touch()
    os.truncate(huge, 8 << 30)
    for path in (more, huge):
        errors = ranks.play(2, "basic_programs:planned", [str(path)] * 2).errors()
        assert {error["type"] for error in errors} == {"UsageError"}
        assert all(
            str(path) in error["text"] and f"{MOST_BYTES:,} bytes" in error["text"] for error in errors
        )


@pytest.mark.parametrize(
    "content", [b"\xff", b"{}\0{}", b" " * (MOST_BYTES + 1)], ids=["utf-8", "zero", "size"]
)
def test_tune_replaces_a_file_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(unisono.UsageError, match=re.escape(str(path))):
        read(path)
    machine = report_data.run().machine
    tune.write(path, 2, machine, table(2)["entries"])
    assert json.loads(read(path))["entries"] == table(2)["entries"]
