"""What the report says, in words and tables, before it becomes HTML or Markdown. Nothing here is escaped
yet."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.records import Failure, Skip, stats, text
from unisono.records.stats import Verdict
from unisono.records.vocabulary import case_text, pair_name, title

from . import analysis
from .analysis import Curve, Group, Headline, Winner, WorkloadCost
from .model import Key, Model, Pair


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; the columns named in `numeric` are aligned right."""

    head: list[str]
    rows: list[list[str]]
    numeric: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Notice:
    """Something the reader must know first. `level`: bad or warn."""

    level: str
    title: str
    items: list[str]


def lead(model: Model) -> str:
    """What ran where, in one sentence."""
    if not model.all_rows:
        if model.links or model.largest:
            return f"Measured on {text.listing(model.machines)}: {_other(model)}."
        return "The records hold no result: what failed, was skipped or cannot be read is below."
    cases = [row.key.case for row in model.all_rows]
    sizes = [case.bytes for case in cases if case.bytes > 0]
    names_run = {case.collective for case in cases}
    collectives = text.count(len(names_run - {"pingpong"}), "collective")
    if "pingpong" in names_run:
        collectives = "pingpong" if len(names_run) == 1 else f"pingpong and {collectives}"
    span = f" of {_range(min(sizes), max(sizes))}" if sizes else ""
    ranks = text.listing([str(n) for n in sorted({case.ranks for case in cases})])
    noun = "rank" if {case.ranks for case in cases} == {1} else "ranks"
    names = f"{text.count(len(model.backends), 'backend')} ({text.listing(model.backends)})"
    seconds = sum(end.elapsed_s for source in model.sources for end in source.ends)
    took = f" in {text.duration(seconds)}" if seconds else ""
    total = text.count(len(model.all_rows), "result")
    unchecked = sum(row.unchecked for row in model.all_rows)
    checks = [f"{unchecked:,} of them not checked"] if unchecked else []
    checks += [f"{text.count(len(model.failures), 'failure')} besides"] if model.failures else []
    checked = text.listing(checks or ["all verified"])
    where = f"{ranks} {noun} of {text.listing(model.machines)}"
    return f"{names} ran {collectives}{span} on {where}: {total}{took}, {checked}."


def _other(model: Model) -> str:
    """What there is besides results."""
    parts = [text.count(len(model.links), "link")] if model.links else []
    parts += [text.count(len(model.largest), "largest size")] if model.largest else []
    return text.listing(parts)


def _range(low: int, high: int) -> str:
    return text.size(low) if low == high else f"{text.size(low)} to {text.size(high)}"


def started(model: Model) -> str:
    """When the runs started, as recorded (UTC)."""
    times = sorted(text.moment(run.started_at) for run in model.runs)
    if not times:
        return ""
    return times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"


def notices(model: Model) -> list[Notice]:
    """What the reader must know before the figures."""
    found = []
    if model.failures:
        texts = [failure_text(failure) for _, failure in model.failures]
        shown = text.shortened(texts, ", see Failures and skips")
        found.append(Notice("bad", f"{text.count(len(model.failures), 'case')} failed", shown))
    for state, why in (
        ("cut short", "was cut short: its end is missing, so cases may be missing too."),
        ("interrupted", "was interrupted: it holds what had been measured by then."),
    ):
        names = [f"{source.name} {why}" for source in model.sources if source.state == state]
        if names:
            found.append(Notice("warn", f"{text.count(len(names), 'run')} {state}", names))
    if model.unchecked:
        found.append(Notice("warn", "Not checked", model.unchecked))
    if model.unsure:
        found.append(Notice("warn", "Measured too briefly", [brief(model)]))
    crowd = crowded(model)
    if crowd:
        found.append(Notice("warn", "More ranks than cores", crowd))
    if model.problems:
        title = f"{text.count(len(model.problems), 'problem')} with the records"
        found.append(Notice("warn", title, text.shortened(model.problems)))
    if model.replaced:
        earlier = text.count(model.replaced, "outcome")
        item = f"{earlier} of earlier runs gave way to later ones: a case's latest result or failure counts."
        found.append(Notice("warn", "Repeated cases", [item]))
    crossed = crossed_runs(model)
    if crossed:
        item = f"{text.count(crossed, 'comparison')} are between results of different runs, not of one run."
        found.append(Notice("warn", "Compared across runs", [item]))
    return found


def crossed_runs(model: Model) -> int:
    """How many comparisons pair results of two different records files."""
    return sum(
        pair.own.source != pair.peer.source for group in analysis.groups(model) for pair in group.total.pairs
    )


def brief(model: Model) -> str:
    """On the results of too few visits."""
    few = f"{text.count(model.unsure, 'result')} of fewer than {stats.MIN_SAMPLES} visits"
    return f"{few}: verdicts on them are UNCLEAR. Give the bench a longer --budget."


def crowded(model: Model) -> list[str]:
    """A sentence for each number of ranks that worked at once on fewer cores."""
    found = set()
    for row in model.all_rows:
        case, runs = row.key.case, model.sources[row.source].runs
        if case.device == "cpu" and case.pair is None and runs:  # of a pair alone the other ranks sleep
            run = runs[0]
            spread = run.nodes if run.launcher != "unisono" else []  # whose nodes are virtual
            ranks = spread.count(spread[0]) if spread else run.ranks
            if ranks > run.machine.cores:
                found.add((ranks, run.machine.cores))
    return [
        f"{ranks} ranks shared {text.count(cores, 'core')}: libraries that busy-wait, as MPICH does, are "
        "slowed by that; such ratios say nothing about machines with a core for each rank."
        for ranks, cores in sorted(found)
    ]


def failure_text(failure: Failure) -> str:
    where = "" if failure.rank is None else f", rank {failure.rank}"
    return f"{failure.backend}: {case_text(failure.case)}{where}: {failure.message}"


def pair_text(pair: Pair) -> str:
    """A ratio with its case and absolute values: `2.10× at all_reduce 4 KiB f32 sum, 2 ranks, latency, plain
    (6.20 µs, mpi 13.0 µs)`."""  # noqa: RUF002
    own, peer = pair.own, pair.peer
    times = f"{text.time(own.interval.median)}, {peer.backend} {text.time(peer.interval.median)}"
    return f"{text.ratio(pair.ratio)} at {case_text(own.key.case, own.key.workload)} ({times})"


def group_title(model: Model, group: Group) -> str:
    return ", ".join([text.count(group.ranks, "rank"), *model.machine_if_several(group.machine)])


def cases_text(line: Headline) -> str:
    """`102 cases`, and where not all are, `10 of them judged`."""
    judged = line.judged
    few = [f"{judged:,} of them judged"] if judged < len(line.pairs) else []
    return ", ".join([text.count(len(line.pairs), "case"), *few])


def headline_cells(line: Headline) -> list[str]:
    """A row of the headline table: collective, geometric mean, cases, verdict counts, best and worst case."""
    counts = [str(line.verdicts[v]) for v in (Verdict.FASTER, Verdict.SAME, Verdict.UNCLEAR, Verdict.SLOWER)]
    if not line.pairs:
        return [
            line.title,
            text.MISSING,
            str(line.alone),
            *counts,
            "no peer ran it" if line.alone else "not run",
            "",
        ]
    return [
        line.title,
        text.ratio(line.mean),
        str(len(line.pairs)),
        *counts,
        pair_text(line.best),
        pair_text(line.worst),
    ]


HEADLINE_HEAD = [
    "Collective",
    "Geometric mean",
    "Cases",
    "FASTER",
    "SAME",
    "UNCLEAR",
    "SLOWER",
    "Best case",
    "Worst case",
]


def why_no_headline(model: Model) -> str | None:
    """A sentence where there is nothing to compare."""
    if not model.all_rows:
        return "There is nothing to compare: the records hold no result."
    if model.subject is None:
        return f"There is nothing to compare: only {model.backends[0]} was measured."
    if not any(group.total.pairs for group in analysis.groups(model)):
        return f"There is nothing to compare: no other library ran a case that {model.subject} ran."
    return None


def fastest_counts(model: Model) -> Table:
    """How often each backend is the fastest, confidently, over the cases that at least two ran."""
    curves = analysis.curves(model)
    contested = [winner for curve in curves for winner in curve.winners if winner.second is not None]
    rows = []
    for backend in model.backends:
        sure = sum(w.sure and w.row.backend == backend for w in contested)
        rows.append(
            [backend, str(sure), f"{100 * sure / len(contested):.0f} %" if contested else text.MISSING]
        )
    unclear = sum(not w.sure for w in contested)
    rows.append(
        [
            "none confidently",
            str(unclear),
            f"{100 * unclear / len(contested):.0f} %" if contested else text.MISSING,
        ]
    )
    return Table(["Fastest backend", "Cases", "Share"], rows, frozenset({1, 2}))


def slice_text(key: Key, model: Model) -> str:
    """The part of a key that is not collective and size: `2 ranks, latency, plain`."""
    case = key.case
    parts = [text.count(case.ranks, "rank"), case.mode, case.memory]
    if case.device != "cpu":
        parts.insert(1, case.device)
    if pair := pair_name(case):
        parts.append(f"pair {pair}")
    if case.scaling is not None:
        parts.append(f"{case.scaling.kind} scaling")
    if case.one_process:
        parts.append("one process")
    if case.placement != "out_of_place":
        parts.append(case.placement.replace("_", " "))
    return ", ".join([*parts, *model.machine_if_several(key.machine)])


def crossovers(model: Model) -> Table:
    """Where one library overtakes another: at a size, or somewhere in a range."""
    rows = []
    for curve in analysis.curves(model):
        for crossing in curve.crossovers:
            left, right = crossing.left, crossing.right
            sizes = [text.size(winner.row.key.case.bytes) for winner in (left, right)]
            meet = f"{sizes[0]} to {sizes[1]}"
            if crossing.estimate is not None:
                meet = f"≈ {text.size(round(crossing.estimate))}"
            rows.append([curve_name(curve), slice_text(curve.key, model), _end(left), _end(right), meet])
    head = ["Collective", "Where", "Faster up to", "Faster from", "Overtaken at"]
    return Table(head, rows, frozenset({4}))


def curve_name(curve: Curve) -> str:
    case = curve.key.case
    return " ".join(part for part in (title(case), case.dtype, case.op) if part)


def _end(winner: Winner) -> str:
    row, other = winner.row, winner.second
    against = f", {other.backend} {text.time(other.interval.median)}" if other else ""
    size = text.size(row.key.case.bytes)
    return f"{row.backend}, {size} ({text.time(row.interval.median)}{against})"


def uncrossed(model: Model) -> str:
    """A sentence on the curves that one backend leads throughout."""
    found = analysis.curves(model)
    single = [curve.only for curve in found if curve.only]
    if not single:
        return ""
    parts = text.listing([f"{name} in {single.count(name)}" for name in dict.fromkeys(single)])
    curves = text.count(len(found), "curve")
    return f"Of {curves}, one backend is never confidently overtaken in {len(single)}: {parts}."


def workload_table(cost: WorkloadCost) -> Table:
    """A workload's time per unit and per step on each backend, and what the best of each would save."""
    workload = cost.workload
    many = workload.units_per_step > 1
    head = [
        "Backend",
        f"Per {workload.unit}",
        "95 % interval",
        *([f"{workload.units_per_step} {workload.unit}s"] if many else []),
    ]
    head += ["Saved by the best of each", "Choice per collective"]
    rows = []
    for item in [*cost.costs, *([cost.mix] if len(cost.costs) > 1 else [])]:
        is_mix = item is cost.mix
        name = analysis.BEST_OF_EACH if is_mix else item.backend
        if item.unit is None:
            missing = [s.collective for s, p in zip(workload.steps, item.parts, strict=True) if p is None]
            blank = [text.MISSING] * (len(head) - 2)
            rows.append([name, *blank, f"not measured: {text.listing(missing)}"])
            continue
        saving = cost.saving(item)
        saved = text.MISSING
        if not is_mix and saving is not None and cost.mix.unit is not None:
            saved = (
                f"{text.time(item.unit.median - cost.mix.unit.median)} ({text.percent(saving)})"
                if saving > 0
                else "0"
            )
        row = [name, text.time(item.unit.median), text.span(item.unit.low, item.unit.high)]
        row += [text.time(item.unit.median * workload.units_per_step)] if many else []
        rows.append([*row, saved, _parts(cost, item, is_mix)])
    return Table(head, rows, frozenset(range(1, len(head) - 1)))


def _parts(cost: WorkloadCost, item: analysis.Cost, with_backend: bool) -> str:
    parts = []
    for step, row in zip(cost.workload.steps, item.parts, strict=True):
        if row is not None:
            by = f" on {row.backend}" if with_backend else ""
            by += f" ({row.result.algorithm})" if row.result.algorithm else ""
            call = f"{step.calls:g} × {step.collective} {text.size(step.bytes)}"  # noqa: RUF001
            parts.append(f"{call}: {text.time(row.interval.median)}{by}")
    return "; ".join(parts)


def failures(model: Model) -> Table:
    head = ["Backend", "Case", "Rank", "Message"]
    rows = []
    for machine, f in model.failures:
        where = ", ".join([case_text(f.case), *model.machine_if_several(machine)])
        rank = text.MISSING if f.rank is None else str(f.rank)
        rows.append([f.backend, where, rank, f.message])
    return Table(head, rows)


def skips(found: Sequence[Skip]) -> Table:
    """Skips with the same backend and reason become one row."""
    grouped = analysis.group_by(found, lambda skip: (skip.backend, skip.reason))
    rows = [[backend, _skipped(members), reason] for (backend, reason), members in grouped.items()]
    return Table(["Backend", "What", "Reason"], rows)


def _skipped(members: Sequence[Skip]) -> str:
    cases = [skip.case for skip in members if skip.case is not None]
    if len(cases) < len(members):
        return "everything"
    if len(cases) == 1:
        return case_text(cases[0])
    names = list(dict.fromkeys(case.collective for case in cases))
    return f"{text.count(len(cases), 'case')} of {text.listing(names)}"


def ceilings(model: Model) -> Table:
    """What each run measured, before its cases and again after them."""
    rows: list[list[str]] = []
    for (index, name), members in analysis.group_by(model.ceilings, lambda c: (c[0], c[1].name)).items():
        source = model.sources[index]
        ranks = text.listing([str(n) for n in sorted({run.ranks for run in source.runs})])
        for number, (_, c) in enumerate(members):
            samples = [text.gbps(end(c.samples_gbps)) for end in (min, max)] if c.samples_gbps else []
            when = ("start", "end")[number % 2]
            row = [name, source.name, ranks, when, text.size(c.bytes), text.gbps(c.gbps)]
            rows.append([*row, " to ".join(samples) or text.MISSING])
    head = ["Ceiling", "Records", "Ranks", "Of the run's", "Size", "GB/s", "Range of its samples"]
    return Table(head, rows, frozenset({2, 4, 5, 6}))


def provenance(model: Model) -> list[tuple[str, Table, str]]:
    """For each run: its title, what is known about it, and the command that reproduces it."""
    found = []
    for source in model.sources:
        for run in source.runs:
            m = run.machine
            end = source.ends[-1] if source.ends else None
            caches = ", ".join(f"{name} {text.size(count)}" for name, count in m.caches.items())
            rows = [
                ["Records", f"{source.name}, {source.state}"],
                ["Started", text.moment(run.started_at)],
                ["Took", text.duration(end.elapsed_s) if end else "unknown"],
                ["Ranks", f"{run.ranks}{_on_nodes(run.nodes)}, launched by {run.launcher}"],
                ["Preset, seed", f"{run.preset or 'none'}, {run.seed}"],
                [
                    "Processor",
                    f"{m.cpu}, {text.count(m.cores, 'core')}, {text.count(m.numa_nodes, 'NUMA node')}",
                ],
                ["Memory, caches", f"{text.size(m.memory_bytes)}; {caches or 'caches unknown'}"],
                ["GPUs, driver", f"{text.listing(m.gpus)}; {m.driver or 'no driver'}"],
                *([["GPUs at the start", "; ".join(m.gpu_state)]] if m.gpu_state else []),
                *([["GPUs at the end", "; ".join(end.gpu_state)]] if end and end.gpu_state else []),
                ["Kernel", m.kernel],
                [
                    "Libraries",
                    ", ".join(f"{name} {version}" for name, version in run.libraries.items()) or "none",
                ],
                [
                    "Environment",
                    " ".join(f"{k}={shlex.quote(v)}" for k, v in run.environment.items()) or "nothing set",
                ],
                ["Commit", run.commit or "unknown"],
                ["Schema, run", f"{run.schema}, {run.run_id}"],
            ]
            found.append((run.run_id, Table(["What", "Value"], rows), shlex.join(run.command)))
    return found


def _on_nodes(nodes: Sequence[int]) -> str:
    """Where the ranks were, if on several nodes: " on 2 nodes (2 and 2)"."""
    if not nodes:
        return ""
    each = [str(nodes.count(node)) for node in sorted(set(nodes))]
    return f" on {len(each)} nodes ({text.listing(each)})"
