"""Reads, checks and merges records into rows (row.py). Every form of the report starts from them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from unisono import records
from unisono.records import (
    Ceiling,
    End,
    Failure,
    Largest,
    Link,
    Machine,
    Result,
    Run,
    Skip,
    Workload,
    derived,
    text,
)
from unisono.records.vocabulary import family

from .row import Cell, Key, Row

PHASE = 1.3  # barriers within this factor are of one phase; in two, small calls differ by 1.7
SUBJECT = "unisono"  # the backend whose speed-up the report shows, if it was measured


@dataclass
class Source:
    """Describes one records file by its heads and its ends."""

    name: str
    runs: list[Run]
    ends: list[End]

    @property
    def state(self) -> str:
        """Returns `complete`, `interrupted` (by the user, in good order) or `cut short` (a launch without an
        end)."""
        if len(self.ends) < max(len(self.runs), 1):
            return "cut short"
        return "interrupted" if any(end.interrupted for end in self.ends) else "complete"

    @property
    def launches(self) -> int:
        """Returns how often the ranks were started; 0: the records do not say."""
        return len({run.launch for run in self.runs if run.launch})

    @property
    def phases(self) -> dict[int, list[float]]:
        """Returns the bench's barrier at the start and the end of each launch, in us; without those that do
        not say."""
        return {end.launch: end.barrier_us for end in self.ends if end.barrier_us}

    @property
    def endless(self) -> list[int]:
        """Returns the numbers of the launches without an end."""
        return sorted({run.launch for run in self.runs} - {end.launch for end in self.ends})


@dataclass
class Model:
    """Holds all that the report shows: the cases of the sweep and those of the workloads."""

    sources: list[Source] = field(default_factory=list)
    hardware: list[Machine | None] = field(default_factory=list)  # each with the most GPUs that a run used
    places: list[list[str]] = field(default_factory=list)  # nodes and fabric of each machine, if any
    backends: list[str] = field(default_factory=list)
    subject: str | None = None
    all_rows: list[Row] = field(default_factory=list)
    ceilings: list[tuple[int, Ceiling]] = field(default_factory=list)  # with the index of their source
    links: list[tuple[int, Link]] = field(default_factory=list)  # with their machine
    largest: list[Largest] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    failures: list[tuple[int, Failure]] = field(default_factory=list)  # with their machine
    workloads: list[tuple[int, Workload]] = field(default_factory=list)  # with their number of ranks
    problems: list[str] = field(default_factory=list)
    left_out: int = 0  # lines that could not be read
    replaced: int = 0  # results and failures that a later run has superseded

    @property
    def rows(self) -> list[Row]:
        """Returns the sweep, or the cases of the workloads if nothing else was measured."""
        return [row for row in self.all_rows if row.key.workload is None] or self.all_rows

    @property
    def workload_rows(self) -> list[Row]:
        return [row for row in self.all_rows if row.key.workload is not None]

    @property
    def unchecked(self) -> list[str]:
        """Says for each reason how many results were not checked after they had been measured."""
        why = Counter(
            row.result.verification.detail or "the run left out the checks"
            for row in self.all_rows
            if row.unchecked
        )
        return [f"{text.count(n, 'result')} may be wrong: {reason}." for reason, n in why.items()]

    @property
    def without_launches(self) -> str:
        """Says how many sources do not say their launches; nothing if all do."""
        count = len({row.source for row in self.all_rows if not row.launches})
        of = f"{text.count(count, 'records file')} of a schema before 1.7"
        return (
            f"{of} {'does' if count == 1 else 'do'} not say the launches: each counts as one."
            if count
            else ""
        )

    @property
    def unsure(self) -> int:
        """Returns the number of results with too few visits for a verdict."""
        return sum(not row.interval.sure for row in self.all_rows)

    @property
    def machines(self) -> list[str]:
        named = zip(map(machine_text, self.hardware), self.places, strict=True)
        return [", ".join([machine, *place]) for machine, place in named]

    def machine_if_several(self, machine: int) -> list[str]:
        """Returns the machine's name if the records come from several, else nothing."""
        return [self.machines[machine]] if len(self.hardware) > 1 else []

    @property
    def runs(self) -> list[Run]:
        return [run for source in self.sources for run in source.runs]


def machine_text(m: Machine | None) -> str:
    """Returns one line that names the hardware: `AMD EPYC 9004, 2 cores, 8 × NVIDIA H200`."""  # noqa: RUF002
    if m is None:
        return "unknown machine"
    gpus = Counter(m.gpus).items()
    return ", ".join([m.cpu, text.count(m.cores, "core"), *(f"{n} × {name}" for name, n in gpus)])  # noqa: RUF001


def load(path: Path) -> Model:
    """Returns the model of a records file, or of all records files below a directory.

    Launches of one run are joined. If two runs measured the same case on the same backend, the later run
    counts, also if the case failed in it. `replaced` counts the superseded results and failures.
    Throws: FileNotFoundError without files. ValueError without a record, or for a schema of another major
    version."""
    model = Model()
    found = []
    for file in records.files(path):
        content = records.Records()
        name = records.name_of(file, path)
        records.read_file(file, name, content)
        found.append((name, content))
    if all(content.empty for _, content in found):
        raise ValueError(f"{path} holds no record of a bench: name a records file or its directory.")
    found.sort(key=lambda item: (item[1].runs[0].started_at if item[1].runs else "", item[0]))
    latest: dict[tuple[Key, str], Row] = {}
    failed: list[tuple[int, Cell, Failure]] = []
    skipped: list[tuple[int, Cell, Skip]] = []
    for index, (name, content) in enumerate(found):
        machine = _add(model, index, name, content)
        failures = list(content.failures)
        launched: dict[tuple[Key, str], list[Result]] = {}
        for result in content.results:
            wrong = _wrong(result)
            if wrong is None:
                cell = Key(machine, result.workload, result.case), result.backend
                others = [one for one in launched.get(cell, []) if _other_launch(one, result)]
                model.replaced += len(launched.get(cell, [])) - len(others)
                launched[cell] = [*others, result]
            elif not any((f.backend, f.case) == (result.backend, result.case) for f in failures):
                failures.append(wrong)
        for cell, results in launched.items():
            model.replaced += cell in latest
            latest[cell] = Row(0, *cell, derived.joined(results), index)
        failed += [(index, (machine, f.backend, f.case), f) for f in failures]
        skipped += [(index, (machine, s.backend, s.case), s) for s in content.skips]
    rows = _superseded(model, list(latest.values()), failed, skipped)
    rows.sort(key=lambda row: (row.key.order(), _rank(row.backend)))
    model.all_rows = [replace(row, id=number) for number, row in enumerate(rows)]
    model.backends = sorted({row.backend for row in rows}, key=_rank)
    model.subject = subject_of(model.backends)
    model.workloads = list({(ranks, one.name): (ranks, one) for ranks, one in model.workloads}.values())
    return model


def _add(model: Model, index: int, name: str, content: records.Records) -> int:
    """Adds what needs no merging to the model. Returns the file's machine."""
    machine = _machine(model, content.runs)
    model.sources.append(Source(name, content.runs, content.ends))
    if not content.runs:
        model.problems.append(f"{name} has no head line that could be read: its provenance is unknown.")
    model.problems += content.problems
    model.left_out += content.left_out
    model.ceilings += [(index, ceiling) for ceiling in content.ceilings]
    model.links += [(machine, link) for link in content.links]
    model.largest += content.largest
    ranks = content.runs[0].ranks if content.runs else 0
    model.workloads += [(ranks, workload) for workload in content.workloads]
    return machine


def one_phase(barriers_us: list[float]) -> bool:
    """Returns whether the machine was in one phase. In another, its host has placed the cores otherwise."""
    return max(barriers_us) <= PHASE * min(barriers_us)


def phases_text(model: Model) -> str:
    """Returns the shortest and the longest barrier of all launches."""
    found = [us for source in model.sources for both in source.phases.values() for us in both]
    return text.span(min(found), max(found)) if found else "no known time"


def uneven(model: Model) -> list[str]:
    """Returns a sentence for each source with launches without an end, or with cases that some lack."""
    found = []
    for index, source in enumerate(model.sources):
        if source.launches > 1 and source.endless:
            numbers = text.listing(list(map(str, source.endless)))
            found.append(
                f"{source.name}: launch {numbers} of {source.launches} has no end; what was measured counts."
            )
        runs = {run.launch: set(run.libraries) for run in source.runs}
        rows = [row for row in model.all_rows if row.source == index and source.launches > 1]
        fewer = sum(
            row.launches < sum(f"backend {row.backend}" in had for had in runs.values()) for row in rows
        )
        if fewer:
            found.append(
                f"{source.name}: {text.count(fewer, 'result')} of fewer launches than its backend had."
            )
    return found


def subject_of(backends: list[str]) -> str | None:
    """Returns the backend whose speed-up is shown: unisono, else the first of several."""
    return SUBJECT if SUBJECT in backends else backends[0] if len(backends) > 1 else None


def _rank(backend: str) -> tuple[bool, bool, str]:
    return (backend != SUBJECT, family(backend) != SUBJECT, backend)


def _machine(model: Model, runs: list[Run]) -> int:
    """Returns the index of a file's machine, which is added if it is new. A run on some of a machine's GPUs
    belongs to that machine. A run across nodes or over a fabric belongs to another one."""
    mine, place = (runs[0].machine, _place(runs[0])) if runs else (None, [])
    for index, known in enumerate(model.hardware):
        if _kind(known) == _kind(mine) and model.places[index] == place:
            if mine and known and len(mine.gpus) > len(known.gpus):
                model.hardware[index] = mine
            return index
    model.hardware.append(mine)
    model.places.append(place)
    return len(model.hardware) - 1


def _place(run: Run) -> list[str]:
    nodes = len(set(run.nodes))
    names = {found[1] for text in run.libraries.values() if (found := re.search(r"provider ([^\s,]+)", text))}
    return [*([text.count(nodes, "node")] if nodes > 1 else []), *sorted(names)]


def _kind(machine: Machine | None) -> tuple[object, ...] | None:
    return None if machine is None else (machine.cpu, machine.cores, set(machine.gpus))


def _wrong(result: Result) -> Failure | None:
    """Returns the failure of a wrong result, None for a right or unchecked one."""
    check = result.verification
    if check.bound == records.NOT_CHECKED or (check.before and check.after):
        return None
    when = "after" if check.before else "before"
    detail = f": {check.detail}" if check.detail else ""
    message = f"the result was wrong {when} the timed part ({check.bound} was required){detail}"
    return Failure(backend=result.backend, case=result.case, rank=None, message=message)


def _other_launch(one: Result, other: Result) -> bool:
    """Returns whether the two are of different launches; False if they do not say."""
    return bool(one.launches and other.launches) and set(one.launches).isdisjoint(other.launches)


def _superseded(
    model: Model,
    rows: list[Row],
    failed: list[tuple[int, Cell, Failure]],
    skipped: list[tuple[int, Cell, Skip]],
) -> list[Row]:
    """Gives the model the failures and skips that no later source has superseded. Returns such rows. All are
    in the order of their sources. What one source says of a cell stands together: a cell that failed may have
    times as well."""
    measured = {row.cell: row.source for row in sorted(rows, key=lambda row: row.source)}
    broken = {cell: source for source, cell, _ in failed}
    model.failures = [
        (cell[0], failure)
        for source, cell, failure in failed
        if source == broken[cell] and source >= measured.get(cell, source)
    ]
    current = [skip for source, cell, skip in skipped if source >= measured.get(cell, source)]
    model.skips = list({msgspec.json.encode(skip): skip for skip in current}.values())
    kept = [row for row in rows if row.source >= broken.get(row.cell, row.source)]
    model.replaced += len(failed) - len(model.failures) + len(rows) - len(kept)
    return kept
