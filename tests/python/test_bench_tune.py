"""`unisono tune`: makes the table that the library reads from measured algorithms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import unisono
from unisono import records
from unisono.bench import tune
from unisono.bench.backends import base
from unisono.bench.cases import CaseError, make_case
from unisono.cli import resolve
from unisono.records import Machine, Result, Verification
from unisono.records.vocabulary import MEMORIES, NORM

MACHINE = Machine(cpu="a processor", cores=2, memory_bytes=1, numa_nodes=1, kernel="Linux", caches={})


def result(size: int, algorithm: str, median: float, width: float = 0.02, memory: str = "plain") -> Result:
    return Result(
        case=make_case("all_reduce", size, "f32", 2, memory=memory),
        backend=f"unisono:{algorithm}",
        algorithm=algorithm,
        samples_us=[median],
        median_us=median,
        ci_low_us=median * (1 - width / 2),
        ci_high_us=median * (1 + width / 2),
        skew_us=None,
        calls_per_sample=1,
        verification=Verification(before=True, after=True, bound="bit-exact"),
        algbw_gbps=1.0,
        busbw_gbps=1.0,
        ceiling_gbps=None,
        sol=None,
        converged=True,
    )


def test_the_fastest_of_each_size_with_the_border_halfway() -> None:
    found = tune.choose(
        [
            *(result(8, "packets", 1), result(8, "two_shot", 3)),
            *(result(1024, "packets", 2), result(1024, "two_shot", 3)),
            *(result(16384, "packets", 9), result(16384, "two_shot", 5)),
        ]
    )
    assert found == [
        {"collective": "all_reduce", "memory": "plain", "up_to_bytes": 4096, "algorithm": "packets"},
        {"collective": "all_reduce", "memory": "plain", "up_to_bytes": None, "algorithm": "two_shot"},
    ]


def test_an_algorithm_stays_until_another_is_confidently_faster() -> None:
    sizes = (8, 64, 512, 4096)
    noisy = [
        r for s in sizes for r in (result(s, "a", 2.0, 0.5), result(s, "b", 1.9 if s == 64 else 2.1, 0.5))
    ]
    assert [entry["algorithm"] for entry in tune.choose(noisy)] == ["a"]


def test_shapes_of_kernels_are_columns_of_a_line() -> None:
    shaped = "push_ll128@128x384x5760"
    found = tune.choose(
        [
            *(result(1024, "push_ll128", 1), result(1024, shaped, 2)),
            *(result(1 << 20, "push_ll128", 2), result(1 << 20, shaped, 1)),
        ]
    )
    assert [e["algorithm"] for e in found] == ["push_ll128", "push_ll128"]
    assert "blocks" not in found[0]
    assert (found[1]["blocks"], found[1]["threads"], found[1]["piece_bytes"]) == (128, 384, 5760)


def test_every_shape_is_a_backend_where_asked_for() -> None:
    plain = tune.variants(["all_gather"], "cuda")
    shaped = tune.variants(["all_gather"], "cuda", shaped=True)
    assert set(plain) < set(shaped)
    assert "unisono:push_ll128@128x512x7680" in shaped
    assert not [
        name for name in shaped if name.startswith(("unisono:push_packets@1", "unisono:copy_engine@1"))
    ]
    for name in shaped:
        assert base.load(name).name == name


@pytest.mark.parametrize("text", ["", "128", "128x256", "128x256x8192x1", "ax2x3", "-1x2x3", "1x2x 3"])
def test_a_shape_is_three_numbers(text: str) -> None:
    with pytest.raises(CaseError, match="is no shape"):
        base.load(f"unisono:push@{text}")


def test_shapes_are_for_gpus() -> None:
    with pytest.raises(CaseError, match="--device cuda"):
        resolve.tune_options(None, 10.0, Path("run"), [], "cpu", shaped=True)


def test_each_memory_has_its_own_entries() -> None:
    found = tune.choose([result(8, "a", 1), result(8, "a_direct", 1, memory="symmetric")])
    assert [(e["memory"], e["algorithm"], e["up_to_bytes"]) for e in found] == [
        ("plain", "a", None),
        ("symmetric", "a_direct", None),
    ]


def test_tables_for_other_numbers_of_ranks_and_other_collectives_stay(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    plain = tune.choose([result(8, "one_shot", 1)])
    symmetric = tune.choose([result(8, "two_shot", 1, memory="symmetric")])
    tune.write(path, 2, MACHINE, plain)
    tune.write(path, 4, MACHINE, plain)
    tune.write(path, 2, MACHINE, symmetric)
    four, two = json.loads(path.read_text())
    assert (four["ranks"], two["ranks"]) == (4, 2)
    assert two["entries"] == [*plain, *symmetric]
    assert two["schema"] == tune.SCHEMA
    assert msgspec.convert(two["machine"], Machine) == MACHINE
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]


def test_tables_of_gpus_are_kept_by_card(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    entries = tune.choose([result(8, "one_shot", 1)])
    for gpus in ([], ["NVIDIA H200"] * 2, ["NVIDIA H100"] * 2, ["NVIDIA H200", "NVIDIA H100"]):
        tune.write(path, 2, msgspec.structs.replace(MACHINE, gpus=gpus), entries)
    tables = json.loads(path.read_text())
    assert [(t.get("device"), t.get("card")) for t in tables] == [
        (None, None),
        ("cuda", "NVIDIA H200"),
        ("cuda", "NVIDIA H100"),
        ("cuda", ""),
    ]


def test_the_built_in_tables_of_gpus_fit_the_library() -> None:
    """Every entry names an algorithm of its collective, on memory on which the algorithm runs."""
    paths = list((Path(__file__).parents[2] / "src" / "core" / "plans").glob("*.json"))
    assert paths
    for path in paths:
        table = json.loads(path.read_text())
        assert (table["schema"], table["device"]) == (tune.SCHEMA, "cuda")
        measured = {(e["collective"], e["memory"]) for e in table["entries"]}
        norms = {(NORM, memory) for memory in MEMORIES}  # by hand, where there are any
        assert measured - norms == {
            (name, memory)
            for name in tune.tunable("cuda")
            for memory in MEMORIES
            if memory == "plain" or name not in tune.ANY_MEMORY
        }
        for collective, memory in measured:
            mine = [e for e in table["entries"] if (e["collective"], e["memory"]) == (collective, memory)]
            known = unisono.Communicator.algorithms(collective, "cuda")
            assert {e["algorithm"] for e in mine} <= set(known)
            sizes = [e["up_to_bytes"] for e in mine]
            assert sizes[-1] is None and sizes[:-1] == sorted(set(sizes[:-1]))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"ranks": 2}', "null"])
def test_a_file_that_is_no_table_is_replaced(text: str) -> None:
    table = {"schema": tune.SCHEMA, "ranks": 2, "entries": []}
    assert tune.merge(text, table) == table


def test_the_library_loads_the_table_of_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    tune.write(path, 1, MACHINE, tune.choose([result(8, "one_shot", 1), result(1 << 20, "two_shot", 1)]))
    monkeypatch.setenv("UNISONO_PLAN", str(path))
    with unisono.init() as comm:
        assert comm.plan("all_reduce", 8) == "one_shot"
        assert comm.plan("all_reduce", 2 << 20) == comm.plan("all_reduce", 1 << 30)


def test_the_command_writes_a_table(tmp_path: Path) -> None:
    words = ["tune", "--ranks", "2", "--collective", "broadcast", "--budget", "4", "-O", "plan.json"]
    words += ["--records", "measured"]
    command = [sys.executable, "-m", "unisono", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "plan.json").read_text())
    assert (table["schema"], table["ranks"]) == (tune.SCHEMA, 2)
    assert {(e["collective"], e["memory"]) for e in table["entries"]} == {("broadcast", m) for m in MEMORIES}
    assert {e["algorithm"] for e in table["entries"]} <= set(unisono.Communicator.algorithms("broadcast"))
    assert tune.choose(records.read(tmp_path / "measured").results) == table["entries"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tune_measures_every_algorithm_of_the_library(tmp_path: Path, device: str) -> None:
    options = resolve.tune_options(None, 10, tmp_path, [], device)
    assert options.device == device
    assert "barrier" not in options.collectives
    for collective in options.collectives:
        for algorithm in unisono.Communicator.algorithms(collective, device):
            shape = tune.AS_PAYS if device == "cuda" else ""
            assert f"unisono:{algorithm}{shape}" in options.backends


def test_on_gpus_one_measurement_is_for_all_memory_and_both_ways_of_calling(tmp_path: Path) -> None:
    grid = resolve.tune_options(None, 10, tmp_path, [], "cuda").grid(2)
    for name in tune.tunable("cuda"):
        assert {(c.memory, c.mode) for c in grid if c.collective == name} == {
            ("symmetric", "graph"),
            ("symmetric", "events"),
        }
    found = tune.choose(
        [
            result(8, name, time, memory="symmetric")
            for name, time in (("push", 3), ("push_packets", 2), ("direct", 1))
        ],
        "cuda",
    )
    assert [(e["memory"], e["algorithm"]) for e in found] == [
        ("plain", "push_packets"),
        ("symmetric", "direct"),
    ]


def test_a_plan_that_ignores_the_memory_is_plain(tmp_path: Path) -> None:
    sent = [
        msgspec.structs.replace(r, case=make_case("send_recv", 8, "f32", 2, memory="symmetric"))
        for r in (result(8, "push", 2), result(8, "direct", 1))
    ]
    assert [(e["memory"], e["algorithm"]) for e in tune.choose(sent, "cuda")] == [("plain", "direct")]


def test_a_plan_that_ignores_the_size_has_one_entry() -> None:
    sizes = [
        (8, {"push": 1.0, "push_packets": 3.0, "push_ll128": 0.5}),
        (64, {"push": 2.0, "push_packets": 1.5}),
        (512, {"push": 9.0, "push_packets": 8.0}),
    ]
    found = [
        msgspec.structs.replace(result(size, name, time), case=make_case("all_to_all_v", size, "f32", 2))
        for size, times in sizes
        for name, time in times.items()
    ]
    line = {"collective": "all_to_all_v", "memory": "plain", "up_to_bytes": None}
    assert tune.choose(found, "cuda") == [{**line, "algorithm": "push"}]  # lines have not run at every size
    assert tune.choose([r for r in found if r.case.bytes > 8], "cuda") == [
        {**line, "algorithm": "push_packets"}
    ]
    assert [e["algorithm"] for e in tune.choose(found)] == ["push_ll128", "push_packets"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_only_two_gpus_send_parts_directly(ranks: int) -> None:
    sizes = [
        ("all_to_all_v", 8, {"push": 1.0}),
        ("all_to_all_v", 512, {"push": 8.0}),
        ("send_recv", 8, {"push": 1.0, "direct@16x128x4096": 2.0}),
        ("send_recv", 128, {"push": 3.0, "direct@16x128x4096": 1.0, "direct@16x256x4096": 2.0}),
        ("send_recv", 512, {"push": 8.0, "direct@16x128x4096": 9.0, "direct@16x256x4096": 7.0}),
    ]
    found = [
        msgspec.structs.replace(
            result(size, name, time),
            algorithm=name.partition("@")[0],
            case=make_case(collective, size, "f32", ranks, memory="symmetric"),
        )
        for collective, size, times in sizes
        for name, time in times.items()
    ]
    parts = [e for e in tune.choose(found, "cuda") if e["collective"] == "all_to_all_v"]
    columns = [(e["up_to_bytes"], e["algorithm"], e.get("threads")) for e in parts]
    assert columns == ([(32, "push", None), (None, "direct", 256)] if ranks == 2 else [(None, "push", None)])
    if ranks == 2:  # without a size that goes directly there is none for parts either
        near = [r for r in found if r.case.bytes == 8]
        assert [e["algorithm"] for e in tune.choose(near, "cuda")] == ["push", "push"]


def test_of_several_modes_the_geometric_mean_counts() -> None:
    def in_mode(mode: str, algorithm: str, median: float) -> Result:
        return msgspec.structs.replace(
            result(8, algorithm, median), case=make_case("all_reduce", 8, "f32", 2, mode=mode, device="cuda")
        )

    graph = [
        in_mode("graph", "push", 1.0),
        in_mode("graph", "push_packets", 1.3),
        in_mode("graph", "push_ll128", 0.1),
    ]
    events = [
        in_mode("events", "push", 9.0),
        in_mode("events", "push_packets", 6.0),
    ]  # lines have failed there
    assert [e["algorithm"] for e in tune.choose(graph)] == ["push_ll128"]
    assert [e["algorithm"] for e in tune.choose(graph + events)] == ["push_packets"]


def test_copy_engines_are_chosen_where_no_kernel_is_faster() -> None:
    sizes = [result(8, "direct", 1.0), result(64, "direct", 1.0), result(64, "copy_engine@0x0x0", 1.005)]
    assert [e["algorithm"] for e in tune.choose(sizes)] == ["direct", "copy_engine"]
    slower = [result(8, "direct", 1.0), result(8, "copy_engine@0x0x0", 1.05)]
    assert [e["algorithm"] for e in tune.choose(slower)] == ["direct"]


def test_a_shape_that_is_no_faster_is_not_chosen() -> None:
    near = [
        result(8, "push@0x0x0", 1.0),
        result(8, "push@64x256x3840", 0.995),
        result(8, "push_packets@0x0x0", 0.99),
    ]
    assert [e["algorithm"] for e in tune.choose(near)] == ["push_packets"]
    assert "blocks" not in tune.choose(near[:2])[0]
    assert tune.choose([near[0], result(8, "push@64x256x3840", 0.9)])[0]["blocks"] == 64


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="unknown device 'tpu'"):
        resolve.tune_options(None, 10, tmp_path, [], "tpu")


@pytest.mark.parametrize("budget_s", [0, -5, float("nan"), float("inf")])
def test_a_budget_that_is_no_time(tmp_path: Path, budget_s: float) -> None:
    with pytest.raises(CaseError, match="give seconds above 0"):
        resolve.tune_options(None, budget_s, tmp_path, [])
