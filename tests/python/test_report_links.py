"""The parts of the report that come from runs on GPUs: links, largest messages, modes of GPUs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

import report_data as data
from unisono import report
from unisono.bench import cases, links
from unisono.bench.cuda.runtime import CudaError
from unisono.cli.app import app
from unisono.cli.finish import FAILED, exit_code
from unisono.errors import UnisonoError
from unisono.records import Ceiling, Largest, Link, Record, read
from unisono.report import html, model, studies, terminal
from unisono.report.blocks import Cell


def link(engine: str, pattern: str, **changes: Any) -> Link:
    values: dict[str, Any] = {"devices": 3, "bytes": 1 << 28, "samples": [1.0, 2.0]}
    return Link(engine=engine, pattern=pattern, **(values | changes))


def measured() -> list[Link]:
    """Three GPUs, of which the pair 0, 2 is slow."""
    found = [
        link("copy_engine", "pair", source=a, target=b, gbps=200.0 if (a, b) == (0, 2) else 390.0)
        for a, b in permutations(range(3), 2)
    ]
    found += [link("copy_engine", "ring", gbps=388.0), link("sm_store", "ring", gbps=360.0, blocks=128)]
    found += [
        link("flag", "round_trip", source=a, target=b, round_trip_us=1.3, bytes=4)
        for a, b in permutations(range(3), 2)
    ]
    return found


def largest() -> Largest:
    case = cases.make_case("all_reduce", 64 << 30, "bf16", 2, mode="events", device="cuda")
    return Largest(
        case=case,
        backend="unisono",
        time_us=2.5e5,
        used_bytes=130 << 30,
        total_bytes=141 << 30,
        stopped="131072 MiB did not run on rank 0: out of memory",
    )


def gpu_run(**changes: Any) -> Record:
    run = data.run(3)
    machine = msgspec.structs.replace(
        run.machine, gpus=["NVIDIA H200"] * 3, gpu_state=["NVIDIA H200, 1980 MHz"]
    )
    return msgspec.structs.replace(run, machine=machine, **changes)


def gpu_results() -> list[Record]:
    found: list[Record] = []
    for mode in ("graph", "events"):
        for size in (4096, 1 << 20):
            case = cases.make_case(
                "all_reduce", size, "bf16", 3, memory="symmetric", mode=mode, device="cuda"
            )
            for backend in ("unisono", "nccl", "nccl-windows", "torch-symm:two_shot"):
                made = data.timed(backend, case, skew_us=None)
                ours = backend == "unisono"
                found.append(
                    msgspec.structs.replace(made, sms=24 if ours else None, staged=ours and size > 4096)
                )
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu")
    ceiling = Ceiling(name="ring", bytes=1 << 28, gbps=388.0, samples_gbps=[388.0])
    data.write(directory, gpu_run(), measured(), ceiling, gpu_results(), largest(), data.end())
    report.build(directory)
    return directory


def test_the_slow_pair_stands_out(built: Path) -> None:
    found = {table.title: table for table in studies.link_matrices(model.load(built))}
    copies = found["copy engine, one pair, one way, GB/s"]
    assert copies.head[1:] == ["GPU 0", "GPU 1", "GPU 2"]
    assert copies.rows[0] == ["GPU 0", "", Cell("390", "v0"), Cell("200", "v6")]
    assert found["flag, round trip of a flag, µs"].rows[2][1] == Cell("1.30", "v0")


def test_page_and_twin_show_links_and_largest(built: Path) -> None:
    page, twin = (built / "report.html").read_text(), (built / "report.md").read_text()
    assert '<section id="links">' in page
    assert '<td class="v6">200</td>' in page
    assert '<section id="largest">' in page
    for words in (
        "SM stores",
        "## Links",
        "## Largest messages",
        "64 GiB",
        "out of memory",
        "two\\_shot, 24 SMs |",
        "two\\_shot, 24 SMs, through host memory",
    ):
        assert words in twin or words in twin.replace("\\", "") or words.replace("\\", "") in twin
    assert "![links](links.png)" in twin
    assert (built / "links.png").stat().st_size > 1000
    assert "NVIDIA H200, 1980 MHz" in page


def test_the_mode_shown_first_is_graph(built: Path) -> None:
    loaded = model.load(built)
    page = html.page(loaded)
    first = {dimension["name"]: dimension["first"] for dimension in page["dimensions"]}
    assert (first["mode"], first["device"]) == ("graph", "cuda")
    assert {row.key.case.device for row in loaded.all_rows} == {"cuda"}


def test_records_of_links_alone_make_a_report(tmp_path: Path) -> None:
    data.write(tmp_path, gpu_run(), measured(), data.end())
    report.build(tmp_path)
    assert "14 links" in (tmp_path / "report.md").read_text()


def test_a_run_to_the_memory_limit_is_good_without_results(tmp_path: Path) -> None:
    data.write(tmp_path, gpu_run(), largest(), data.end())
    assert exit_code(read(tmp_path)) == 0


def test_the_tables_of_the_command() -> None:
    console = Console(file=io.StringIO(), width=160)
    for table in terminal.link_tables(measured()):
        console.print(table)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "200 to 390" in said
    assert "GPU 2" in said
    assert "round trip" in said


@pytest.mark.parametrize("error", [CudaError("no peer access."), UnisonoError("load failed.")])
@pytest.mark.parametrize("before", [0, 7])
def test_links_that_fail_are_said_and_the_others_kept(
    error: Exception, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(devices: int, show: object) -> Iterator[Link]:
        yield from measured()[:before]
        raise error

    monkeypatch.setattr(links, "gpus", lambda: 3)
    monkeypatch.setattr(links, "_head", lambda *given: gpu_run())
    monkeypatch.setattr(links, "_measured", failing)
    done = CliRunner().invoke(app, ["links", "-O", str(tmp_path)])
    assert done.exit_code == FAILED, done.output
    assert f"unisono links: {error}" in done.output
    assert "report: " in done.output
    found = read(tmp_path)
    assert (len(found.links), len(found.ceilings), len(found.ends)) == (before, before > 0, 0)
