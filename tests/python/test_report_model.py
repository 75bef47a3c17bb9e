"""From records to rows: reading, merging, checking, and what is compared with what."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import report_data as data
from unisono.records import NOT_CHECKED, Record, Skip, Verification
from unisono.report import gate, model, pairing, payload, sections, tables


def test_rows_are_ordered_and_the_subject_is_unisono(tmp_path: Path) -> None:
    found = model.load(data.write(tmp_path, data.run(), data.sweep(), data.end()))
    assert found.backends == ["unisono", "gloo", "mpi"]
    assert found.subject == "unisono"
    names = list(dict.fromkeys(row.key.case.collective for row in found.rows))
    assert names == ["all_reduce", "broadcast", "barrier"]
    assert [row.id for row in found.all_rows] == list(range(len(found.all_rows)))
    assert found.sources[0].state == "complete"
    assert not found.problems


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_line_cut_in_the_middle_loses_that_line_only(tmp_path: Path, cut: int) -> None:
    data.write(tmp_path, data.run(), data.sweep())
    file = tmp_path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    found = model.load(tmp_path)
    if cut > 1:
        assert len(found.all_rows) == len(data.sweep()) - 1
        assert "the file ends in the middle" in found.problems[0]
    assert found.sources[0].state == "cut short"


def test_an_interrupted_run_and_an_unknown_head_are_said(tmp_path: Path) -> None:
    data.write(tmp_path / "a", data.run(), data.sweep(), data.end(interrupted=True))
    data.write(tmp_path / "b", data.sweep(ranks=4), data.end())
    found = model.load(tmp_path)
    assert [source.state for source in found.sources] == ["complete", "interrupted"]
    assert any("b/records.jsonl has no head" in problem for problem in found.problems)


def test_files_merge_and_the_later_run_counts(tmp_path: Path) -> None:
    what = data.case()
    early = data.run(started_at="2026-01-01T00:00:00+00:00")
    late = data.run(started_at="2026-01-03T00:00:00+00:00")
    data.write(tmp_path / "z-first", early, data.timed("unisono", what, 10.0), data.end())
    data.write(tmp_path / "a-second", late, data.timed("unisono", what, 20.0), data.end())
    found = model.load(tmp_path)
    assert len(found.all_rows) == 1
    assert found.replaced == 1
    assert found.all_rows[0].interval.median > 15


def _days(tmp_path: Path, *found: list[Record]) -> model.Model:
    """One run a day, with what it found besides mpi's time."""
    for day, records in enumerate(found, start=1):
        head = data.run(started_at=f"2026-01-0{day}T00:00:00+00:00")
        data.write(tmp_path / str(day), head, data.timed("mpi", data.case(), 30.0), records, data.end())
    return model.load(tmp_path)


@pytest.mark.parametrize("how", ["failed", "wrong"])
def test_a_later_failure_counts(tmp_path: Path, how: str) -> None:
    wrong = Verification(before=True, after=False, bound="bit-exact")
    bad = data.failure() if how == "failed" else data.timed("unisono", data.case(), verification=wrong)
    found = _days(tmp_path, [data.timed("unisono", data.case())], [bad])
    assert [row.backend for row in found.all_rows] == ["mpi"]
    assert [(machine, f.backend) for machine, f in found.failures] == [(0, "unisono")]
    assert found.replaced == 2  # mpi's time too
    assert "1 failure besides" in sections.lead(found)
    assert "all verified" not in sections.lead(found)


def test_a_later_result_counts(tmp_path: Path) -> None:
    skip = Skip(backend="gloo", reason="not built", case=data.case())
    again = [data.timed(name, data.case()) for name in ("unisono", "gloo")]
    found = _days(tmp_path, [data.failure(), skip], [data.failure()], again)
    assert {row.backend for row in found.all_rows} == {"unisono", "gloo", "mpi"}
    assert not found.failures and not found.skips
    assert found.replaced == 4
    assert "all verified" in sections.lead(found)
    assert gate.gate(tmp_path).passed


def test_a_failure_is_of_its_machine(tmp_path: Path) -> None:
    other = data.run(started_at="2026-01-03T00:00:00+00:00")
    other.machine = msgspec.structs.replace(other.machine, cpu="Other CPU")
    both = [data.timed(name, data.case()) for name in ("unisono", "mpi")]
    data.write(tmp_path / "a", data.run(), both, data.end())
    data.write(tmp_path / "b", other, data.failure(), data.timed("mpi", data.case()), data.end())
    found = model.load(tmp_path)
    assert [machine for machine, _ in found.failures] == [1]
    cells = {cell["machine"]: cell["cell"] for cell in payload.heat(found)}
    assert [cells[machine] == "failed" for machine in found.machines] == [False, True]
    assert "Other CPU" in tables.failures(found).rows[0][1]


def test_machines_are_told_apart(tmp_path: Path) -> None:
    other = data.run()
    other.machine = msgspec.structs.replace(other.machine, cpu="Other CPU", gpus=["H200", "H200"])
    data.write(tmp_path / "a", data.run(), data.timed("unisono", data.case()), data.end())
    data.write(tmp_path / "b", other, data.timed("mpi", data.case()), data.end())
    found = model.load(tmp_path)
    assert found.machines == ["Test CPU, 2 cores", "Other CPU, 2 cores, 2 × H200"]  # noqa: RUF001
    assert pairing.pairs(found.rows, "unisono")[0] == []


def test_some_of_a_machines_gpus_are_that_machine(tmp_path: Path) -> None:
    """The first point of a scaling uses one GPU, the last one all."""
    for gpus in (1, 4, 2):
        head = data.run()
        head.machine = msgspec.structs.replace(head.machine, gpus=["H200"] * gpus)
        timed = data.timed("unisono", data.case(ranks=gpus), 10.0)
        data.write(tmp_path / str(gpus), head, timed, data.end())
    found = model.load(tmp_path)
    assert found.machines == ["Test CPU, 2 cores, 4 × H200"]  # noqa: RUF001
    assert {row.key.machine for row in found.all_rows} == {0}


def test_a_wrong_result_is_a_failure_said_once(tmp_path: Path) -> None:
    wrong = Verification(before=True, after=False, bound="bit-exact", detail="element 7")
    told = data.case(size=8)
    data.write(
        tmp_path,
        data.run(),
        data.failure("unisono", told),
        data.timed("unisono", told, verification=wrong),
        data.timed("unisono", data.case(size=64), verification=wrong),
        data.end(),
    )
    found = model.load(tmp_path)
    assert not found.all_rows
    assert [f.case.bytes for _, f in found.failures] == [8, 64]
    assert "wrong after the timed part" in found.failures[1][1].message
    assert "element 7" in found.failures[1][1].message


def test_an_unchecked_result_counts_and_is_said(tmp_path: Path) -> None:
    open_ = Verification(before=False, after=False, bound=NOT_CHECKED)
    data.write(tmp_path, data.run(), data.timed("unisono", data.case(), verification=open_), data.end())
    found = model.load(tmp_path)
    assert len(found.all_rows) == 1
    assert found.unchecked == ["1 result may be wrong: the run left out the checks."]


def test_a_result_of_few_visits_is_unsure_and_said(tmp_path: Path) -> None:
    """Records of old have no visits: they count by their samples."""
    visits = {8: [10] * 5, 64: [10] * 6, 512: []}
    rows = [
        data.timed("unisono", data.case(size=size), count=sum(of) or 60, visits=of)
        for size, of in visits.items()
    ]
    found = model.load(data.write(tmp_path, data.run(), rows, data.end()))
    assert {row.key.case.bytes for row in found.all_rows if not row.interval.sure} == {8}
    assert found.unsure == 1
    (notice,) = sections.notices(found)
    assert "1 result of fewer than 6 visits" in notice.items[0]


@pytest.mark.parametrize(
    "change",
    [{"samples_us": []}, {"samples_us": [0.0, 2.0]}, {"samples_us": [-1.0, 2.0]}, {"visits": [30, 31]}],
    ids=["no samples", "zero", "negative", "visits of other samples"],
)
def test_numbers_that_cannot_be_are_left_out_and_said(tmp_path: Path, change: dict[str, object]) -> None:
    bad = msgspec.structs.replace(data.timed("unisono", data.case()), **change)
    data.write(tmp_path, data.run(), bad, data.timed("mpi", data.case()), data.end())
    found = model.load(tmp_path)
    assert [row.backend for row in found.all_rows] == ["mpi"]
    assert "unisono on all_reduce 64 KiB f32 sum" in found.problems[0]


def test_the_best_peer_is_the_fastest_other_library(tmp_path: Path) -> None:
    what = data.case()
    found = model.load(
        data.write(
            tmp_path,
            data.run(),
            [data.timed(name, what, us) for name, us in (("unisono", 10), ("mpi", 30), ("gloo", 20))],
            data.timed("unisono:two_shot", what, 5),
            data.end(),
        )
    )
    ((pair,), alone, missing) = pairing.pairs(found.rows, "unisono")
    assert pair.peer.backend == "gloo"
    assert not alone and not missing
    ((named,), _, _) = pairing.pairs(found.rows, "unisono", "unisono:two_shot")
    assert named.peer.backend == "unisono:two_shot"
    assert found.backends[:2] == ["unisono", "unisono:two_shot"]


def test_what_quantises_is_a_peer_of_what_quantises_alone(tmp_path: Path) -> None:
    what, bits = data.case(), {"unisono:fp8": 8.25, "flashinfer": 8.125}
    times = {"unisono": 20, "nccl": 30, "unisono:fp8": 10, "flashinfer": 15}
    timed = [data.timed(name, what, us) for name, us in times.items()]
    rows = [msgspec.structs.replace(one, wire_bits=bits.get(one.backend)) for one in timed]
    found = model.load(data.write(tmp_path, data.run(), rows, data.end())).rows
    assert [pair.peer.backend for pair in pairing.pairs(found, "unisono")[0]] == ["nccl"]
    assert [pair.peer.backend for pair in pairing.pairs(found, "unisono:fp8")[0]] == ["flashinfer"]
    ((named,), _, _) = pairing.pairs(found, "unisono", "flashinfer")
    assert named.peer.backend == "flashinfer"


def test_subject_without_unisono() -> None:
    assert model.subject_of(["gloo", "mpi"]) == "gloo"
    assert model.subject_of(["gloo"]) is None
    assert model.subject_of([]) is None


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    data.write(tmp_path, data.run(schema="2.0"))
    with pytest.raises(ValueError, match=r"schema 2\.0"):
        model.load(tmp_path)


def test_no_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="unisono bench"):
        model.load(tmp_path)


def test_other_lines_of_json_beside_the_records_are_let_be(tmp_path: Path) -> None:
    data.write(tmp_path, data.run(), data.timed("unisono", data.case()), data.end())
    data.write(tmp_path, data.run(), data.timed("mpi", data.case()), data.end(), name="records-mpi.jsonl")
    (tmp_path / "before.jsonl").write_text('{"type": "benchmark"}\n')
    found = model.load(tmp_path)
    assert [source.name for source in found.sources] == ["records-mpi.jsonl", "records.jsonl"]
    assert not found.problems


def test_many_problems_are_named_in_part(tmp_path: Path) -> None:
    file = data.write(tmp_path, data.run(), data.timed("unisono", data.case()), data.end()) / "records.jsonl"
    file.write_text(file.read_text() + "?\n" * 20)
    (notice,) = (n for n in sections.notices(model.load(tmp_path)) if n.title.startswith("20 problems"))
    assert len(notice.items) == 9
    assert notice.items[-1] == "and 12 more."
    assert len([note for note in gate.gate(tmp_path).notes if "left out" in note]) == 8
