"""What the records say, as tidy rows: read, checked and deduplicated once; every form of the report starts
here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from unisono import records
from unisono.records import (
    Case,
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
    stats,
    text,
)
from unisono.records.stats import Interval, Verdict
from unisono.records.vocabulary import collective_order, family

SUBJECT = "unisono"  # the backend whose speed-up the report is about, where it was measured


@dataclass(frozen=True)
class Key:
    """What makes two results comparable: the same case, on the same machine, for the same workload (or
    none)."""

    machine: int
    workload: str | None
    case: Case

    def order(self) -> tuple[object, ...]:
        """Sorts rows as a reader expects them: by ranks and mode, then collective, then size."""
        c = self.case
        place = collective_order(c.collective)
        slice_ = (
            self.machine,
            self.workload or "",
            c.device,
            c.one_process,
            c.ranks,
            c.mode,
            c.memory if c.bytes else "~",  # a barrier has none: it stands last of them all
            c.placement,
            (c.scaling.kind, c.scaling.bytes) if c.scaling else ("", 0),
        )
        how = (c.collective, c.pattern or "", c.streams or "", c.pair or ())
        return (*slice_, *place, *how, c.dtype, c.op or "", -1 if c.root is None else c.root, c.bytes)


Cell = tuple[int, str, Case | None]  # machine, backend, and the case; None: all that a backend skips


@dataclass(frozen=True)
class Row:
    """One result, with the order statistics of its samples (microseconds)."""

    id: int
    key: Key
    backend: str
    result: Result
    source: int  # which of Model.sources it came from

    @property
    def interval(self) -> Interval:
        r = self.result
        sure = len(r.visits or r.samples_us) >= stats.MIN_SAMPLES
        return Interval(r.median_us, r.ci_low_us, r.ci_high_us, sure)

    @property
    def unchecked(self) -> bool:
        return self.result.verification.bound == records.NOT_CHECKED

    @cached_property
    def samples(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """All samples in ascending order."""
        return np.sort(np.asarray(self.result.samples_us, dtype=np.float64))

    @cached_property
    def quartiles(self) -> tuple[float, float]:
        q1, q3 = np.quantile(self.samples, (0.25, 0.75))
        return float(q1), float(q3)

    @cached_property
    def percentiles(self) -> dict[float, float | None]:
        """p50, p95, p99; None where the number of samples does not carry one."""
        return stats.quantiles(self.samples)

    @cached_property
    def variation(self) -> float | None:
        return stats.variation(self.samples)

    def bandwidth(self, time_us: float) -> float:
        """Bus bandwidth (GB/s) of this case had it taken `time_us`."""
        return self.result.busbw_gbps * self.result.median_us / time_us


@dataclass(frozen=True)
class Pair:
    """The subject's result and a peer's, of the same case: the best one's, and `others` are the rest by their
    medians. `ratio` above 1: the subject is faster."""

    own: Row
    peer: Row
    others: tuple[Row, ...] = ()

    @property
    def sure(self) -> bool:
        """Whether both were measured often enough for a verdict."""
        return self.own.interval.sure and self.peer.interval.sure

    @property
    def ratio(self) -> float:
        return self.peer.interval.median / self.own.interval.median

    @property
    def low(self) -> float:
        return self.peer.interval.low / self.own.interval.high

    @property
    def high(self) -> float:
        return self.peer.interval.high / self.own.interval.low

    @property
    def verdict(self) -> Verdict:
        """FASTER than all peers, SLOWER than any, else as against the best."""
        found = [stats.verdict(self.own.interval, row.interval) for row in (self.peer, *self.others)]
        if Verdict.SLOWER in found:
            return Verdict.SLOWER
        return Verdict.UNCLEAR if found[0] is Verdict.FASTER and len(set(found)) > 1 else found[0]


@dataclass
class Source:
    """One records file: its heads, its ends, and whether it stops before its end."""

    name: str
    runs: list[Run]
    ends: list[End]
    machine: int

    @property
    def state(self) -> str:
        """`complete`, `interrupted` (in good order, by the user) or `cut short` (no end was written)."""
        if len(self.ends) < max(len(self.runs), 1):
            return "cut short"
        return "interrupted" if any(end.interrupted for end in self.ends) else "complete"


@dataclass
class Model:
    """Everything the report shows. `rows` holds the size sweep, `workload_rows` the cases of workloads."""

    sources: list[Source] = field(default_factory=list)
    hardware: list[Machine | None] = field(default_factory=list)  # of each machine, the most of its GPUs
    places: list[list[str]] = field(default_factory=list)  # how its ranks are joined, where not on one node
    backends: list[str] = field(default_factory=list)
    subject: str | None = None
    all_rows: list[Row] = field(default_factory=list)
    ceilings: list[tuple[int, Ceiling]] = field(default_factory=list)  # with their source
    links: list[tuple[int, Link]] = field(default_factory=list)
    largest: list[Largest] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    workloads: list[tuple[int, Workload]] = field(default_factory=list)  # as defined for so many ranks
    problems: list[str] = field(default_factory=list)
    left_out: int = 0  # lines of the records in which something else may stand
    replaced: int = 0  # results and failures that a later run has superseded

    @property
    def rows(self) -> list[Row]:
        """The sweep; where only workloads were measured, their cases."""
        return [row for row in self.all_rows if row.key.workload is None] or self.all_rows

    @property
    def workload_rows(self) -> list[Row]:
        return [row for row in self.all_rows if row.key.workload is not None]

    @property
    def unchecked(self) -> list[str]:
        """How many results were not checked after they had been measured, for each reason."""
        why = Counter(
            row.result.verification.detail or "the run left out the checks"
            for row in self.all_rows
            if row.unchecked
        )
        return [f"{text.count(n, 'result')} may be wrong: {reason}." for reason, n in why.items()]

    @property
    def unsure(self) -> int:
        """Results of so few visits that no verdict can be given on them."""
        return sum(not row.interval.sure for row in self.all_rows)

    @property
    def machines(self) -> list[str]:
        named = zip(map(machine_text, self.hardware), self.places, strict=True)
        return [", ".join([machine, *place]) for machine, place in named]

    def machine_if_several(self, machine: int) -> list[str]:
        """Its name, where the records are of several; else nothing."""
        return [self.machines[machine]] if len(self.hardware) > 1 else []

    @property
    def runs(self) -> list[Run]:
        return [run for source in self.sources for run in source.runs]


def machine_text(m: Machine | None) -> str:
    """One line that names the hardware: `AMD EPYC 9004, 2 cores, 8 × NVIDIA H200`."""  # noqa: RUF002
    if m is None:
        return "unknown machine"
    kinds = {name: m.gpus.count(name) for name in m.gpus}
    parts = [m.cpu, text.count(m.cores, "core"), *(f"{n} × {name}" for name, n in kinds.items())]  # noqa: RUF001
    return ", ".join(parts)


def load(path: Path) -> Model:
    """The model of a records file, or of all those below a directory.

    The same case on the same backend in two runs: the later run counts, whether it measured the case or
    failed in it, and `replaced` says how many results and failures were superseded. Raises FileNotFoundError
    where there are no files, ValueError where they hold no record, or one of a schema of another major
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
        machine = _machine(model, content.runs)
        model.sources.append(Source(name, content.runs, content.ends, machine))
        if not content.runs:
            model.problems.append(f"{name} has no head line that could be read: its provenance is unknown.")
        model.problems += content.problems
        model.left_out += content.left_out
        model.ceilings += [(index, ceiling) for ceiling in content.ceilings]
        model.links += [(machine, link) for link in content.links]
        model.largest += content.largest
        failures = list(content.failures)
        for result in content.results:
            wrong = _wrong(result)
            if wrong is None:
                cell = Key(machine, result.workload, result.case), result.backend
                model.replaced += cell in latest
                latest[cell] = Row(0, *cell, result, index)
            elif not any((f.backend, f.case) == (result.backend, result.case) for f in failures):
                failures.append(wrong)
        failed += [(index, (machine, f.backend, f.case), f) for f in failures]
        skipped += [(index, (machine, s.backend, s.case), s) for s in content.skips]
        of_ranks = content.runs[0].ranks if content.runs else 0
        model.workloads += [(of_ranks, workload) for workload in content.workloads]
    rows = _superseded(model, list(latest.values()), failed, skipped)
    rows.sort(key=lambda row: (row.key.order(), _rank(row.backend)))
    model.all_rows = [replace(row, id=number) for number, row in enumerate(rows)]
    model.backends = sorted({row.backend for row in rows}, key=_rank)
    model.subject = subject_of(model.backends)
    model.workloads = list({(ranks, one.name): (ranks, one) for ranks, one in model.workloads}.values())
    return model


def subject_of(backends: list[str]) -> str | None:
    """The backend whose speed-up is shown: unisono, else the first one, if there is more than one to
    compare."""
    return SUBJECT if SUBJECT in backends else backends[0] if len(backends) > 1 else None


def pairs(
    rows: Iterable[Row], subject: str | None, against: str = "best"
) -> tuple[list[Pair], list[Row], list[Row]]:
    """The subject's rows with their peers, those without, and of each case that only peers ran the best row:
    `against` is a backend, or `best`: the peer with the smallest median of that case; variants of the subject
    (`unisono:two_shot`) are not its peers unless named."""
    by_case: dict[Key, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.key, []).append(row)
    matched, alone, missing = [], [], []
    for members in by_case.values():
        own = [row for row in members if row.backend == subject]
        peers = [row for row in members if _is_peer(row.backend, subject, against)]
        peers.sort(key=lambda row: (row.interval.median, row.backend))
        if peers:
            matched += [Pair(row, peers[0], tuple(peers[1:])) for row in own]
            missing += [] if own else peers[:1]
        else:
            alone += own
    return matched, alone, missing


def _is_peer(backend: str, subject: str | None, against: str) -> bool:
    if against == "best":
        return family(backend) != family(subject or "")
    return backend == against != subject


def _rank(backend: str) -> tuple[bool, bool, str]:
    return (backend != SUBJECT, family(backend) != SUBJECT, backend)


def _machine(model: Model, runs: list[Run]) -> int:
    """The index of the machine that a file is of. A run on some of a machine's GPUs is of that machine; one
    across nodes, or over a fabric, is of another."""
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
    """The failure that a wrong result is."""
    check = result.verification
    if check.bound == records.NOT_CHECKED or (check.before and check.after):
        return None
    when = "after" if check.before else "before"
    detail = f": {check.detail}" if check.detail else ""
    message = f"the result was wrong {when} the timed part ({check.bound} was required){detail}"
    return Failure(backend=result.backend, case=result.case, rank=None, message=message)


def _superseded(
    model: Model,
    rows: list[Row],
    failed: list[tuple[int, Cell, Failure]],
    skipped: list[tuple[int, Cell, Skip]],
) -> list[Row]:
    """Gives the model the failures and skips, and returns the rows, that no later source has superseded; all
    are in the order of their sources. What one source says of a cell stands together: a cell that failed may
    have times as well."""
    measured = {_cell(row): row.source for row in sorted(rows, key=lambda row: row.source)}
    broken = {cell: source for source, cell, _ in failed}
    model.failures = [
        (cell[0], failure)
        for source, cell, failure in failed
        if source == broken[cell] and source >= measured.get(cell, source)
    ]
    model.skips = _unique([skip for source, cell, skip in skipped if source >= measured.get(cell, source)])
    kept = [row for row in rows if row.source >= broken.get(_cell(row), row.source)]
    model.replaced += len(failed) - len(model.failures) + len(rows) - len(kept)
    return kept


def _cell(row: Row) -> Cell:
    return row.key.machine, row.backend, row.key.case


def _unique(skips: list[Skip]) -> list[Skip]:
    return list({msgspec.json.encode(skip): skip for skip in skips}.values())
