"""Lists the sections of the report with their tables and charts. Page and twin render the same list."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from unisono.records import WorkloadStep, stats, text
from unisono.records.vocabulary import product_text, sends

from . import analysis, figures, matmuls, payload, studies, tables, words
from .blocks import Block, Chart, Headline, Items, Part, Scale, Table, Tally, Terms, Text
from .model import Model, one_phase, phases_text, uneven


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    blocks: list[Block]


def sections(model: Model) -> list[Section]:
    """Returns the sections that have something to show."""
    introductions = words.of_sections(model)
    found = []
    for anchor, title, make in _SECTIONS:
        if blocks := make(model):
            only = "page" if anchor in _ONLY_PAGE else ""
            intro = [Part([Text(introductions[anchor])], only=only)] if anchor in introductions else []
            found.append(Section(anchor, title, [*intro, *blocks]))
    return found


def lead(model: Model) -> str:
    """Says in one sentence what ran where."""
    if not model.all_rows:
        if not (model.links or model.largest):
            return "The records hold no result: what failed, was skipped or cannot be read is below."
        counts = ((len(model.links), "link"), (len(model.largest), "largest size"))
        found = text.listing([text.count(number, noun) for number, noun in counts if number])
        return f"Measured on {text.listing(model.machines)}: {found}."
    cases = [row.key.case for row in model.all_rows]
    sized = {case.bytes for case in cases if case.bytes > 0 and case.moe is None and sends(case)}
    sizes = [text.size(size) for size in sorted(sized)]
    names = {case.collective for case in cases if case.moe is None and sends(case)}
    tokens = sorted({case.moe.tokens for case in cases if case.moe is not None})
    what = ["pingpong"] if "pingpong" in names else []
    if tokens:
        most = " to ".join(dict.fromkeys((f"{tokens[0]:,}", text.count(tokens[-1], "token"))))
        what.append(f"mixture of experts of {most}")
    others = names - {"pingpong"}
    what += [text.count(len(others), "collective")] if others else []
    span = f" of {' to '.join(dict.fromkeys((sizes[0], sizes[-1])))}" if sizes else ""
    ranks = sorted({case.ranks for case in cases})
    where = f"{text.listing([str(n) for n in ranks])} {'rank' if ranks == [1] else 'ranks'}"
    seconds = sum(end.elapsed_s for source in model.sources for end in source.ends)
    took = f" in {text.duration(seconds)}" if seconds else ""
    unchecked = sum(row.unchecked for row in model.all_rows)
    checks = [f"{unchecked:,} of them not checked"] if unchecked else []
    checks += [f"{text.count(len(model.failures), 'failure')} besides"] if model.failures else []
    return (
        f"{text.count(len(model.backends), 'backend')} ({text.listing(model.backends)}) ran "
        f"{' and '.join(what)}{span} on {where} of {text.listing(model.machines)}: "
        f"{text.count(len(cases), 'result')}{took}, {text.listing(checks or ['all verified'])}."
    )


def notices(model: Model) -> list[Block]:
    """Says what the reader must know before the figures."""
    failed = [tables.failure_text(failure) for _, failure in model.failures]
    cut = _in_state(model, "cut short", "its end is missing, so cases may be missing too")
    interrupted = _in_state(model, "interrupted", "it holds what had been measured by then")
    replaced = (
        f"{text.count(model.replaced, 'outcome')} of earlier runs gave way to later ones: a case's latest "
        "result or failure counts."
    )
    crossed = sum(
        pair.own.source != pair.peer.source for group in analysis.groups(model) for pair in group.total.pairs
    )
    between = f"{text.count(crossed, 'comparison')} are between results of different runs, not of one run."
    found = [
        (
            "bad",
            f"{text.count(len(failed), 'case')} failed",
            text.shortened(failed, ", see Failures and skips"),
        ),
        ("warn", f"{text.count(len(cut), 'run')} cut short", cut),
        ("warn", f"{text.count(len(interrupted), 'run')} interrupted", interrupted),
        ("warn", "Not checked", model.unchecked),
        ("warn", "Measured too briefly", [brief(model)] if model.unsure else []),
        ("warn", "Launches that ended otherwise", uneven(model)),
        ("warn", "Phases of the machine", moved(model)),
        ("warn", "More ranks than cores", crowded(model)),
        (
            "warn",
            f"{text.count(len(model.problems), 'problem')} with the records",
            text.shortened(model.problems),
        ),
        ("warn", "Repeated cases", [replaced] if model.replaced else []),
        ("warn", "Compared across runs", [between] if crossed else []),
    ]
    return [Items(title, items, level) for level, title, items in found if items]


def _in_state(model: Model, state: str, why: str) -> list[str]:
    return [f"{source.name} was {state}: {why}." for source in model.sources if source.state == state]


def brief(model: Model) -> str:
    """Says how many results had too few visits."""
    few = f"{text.count(model.unsure, 'result')} of fewer than {stats.MIN_SAMPLES} visits"
    return f"{few}: verdicts on them are UNCLEAR. Give the bench a longer --budget."


def launched(model: Model) -> str:
    """Says how many launches of the ranks the intervals cover."""
    counts = [row.launches for row in model.all_rows if row.launches]
    if not counts:
        return ""
    cover = text.count(max(counts), "launch")
    if min(counts) < max(counts):
        cover = f"{min(counts)} to {cover}"
    one = "" if max(counts) > 1 else ": how another launch would differ is not in them"
    return f"The intervals cover {cover} of the ranks{one}."


def moved(model: Model) -> list[str]:
    """Says if the machine was not the same all the time: a host may move the cores of a virtual machine."""
    every = [[us for both in source.phases.values() for us in both] for source in model.sources]
    if all(one_phase(found) for found in every if found):
        return []
    between = f"the bench's barrier between the ranks took {phases_text(model)}"
    return [f"{between}: the cores were not equally far apart all the time, and times of small calls differ."]


def crowded(model: Model) -> list[str]:
    """Returns a sentence for each number of ranks that worked at once on fewer cores."""
    found = set()
    for row in model.all_rows:
        case, runs = row.key.case, model.sources[row.source].runs
        if case.device == "cpu" and case.pair is None and runs:  # while one pair works the other ranks sleep
            run = runs[0]
            spread = run.nodes if run.launcher != "unisono" else []  # its nodes are virtual
            ranks = spread.count(spread[0]) if spread else run.ranks
            if ranks > run.machine.cores:
                found.add((ranks, run.machine.cores))
    return [
        f"{ranks} ranks shared {text.count(cores, 'core')}: libraries that busy-wait, as MPICH does, are "
        "slowed by that; such ratios say nothing about machines with a core for each rank."
        for ranks, cores in sorted(found)
    ]


def cases_text(line: analysis.Headline) -> str:
    """Returns `102 cases`, or `102 cases, 10 of them judged` if not all are."""
    few = [f"{line.judged:,} of them judged"] if line.judged < len(line.pairs) else []
    return ", ".join([text.count(len(line.pairs), "case"), *few])


def _nothing_to_compare(model: Model) -> str:
    if not model.all_rows:
        return "There is nothing to compare: the records hold no result."
    if model.subject is None:
        return f"There is nothing to compare: only {model.backends[0]} was measured."
    return f"There is nothing to compare: no other library ran a case that {model.subject} ran."


def _summary(model: Model) -> list[Block]:
    times = sorted(text.moment(run.started_at) for run in model.runs)
    started = f"Started {' to '.join(dict.fromkeys((times[0], times[-1])))}." if times else ""
    note = " ".join(filter(None, [started, launched(model), model.without_launches]))
    blocks: list[Block] = [Text(lead(model), "lead"), *([Text(note, "note")] if note else [])]
    blocks += notices(model)
    compared = [group for group in analysis.groups(model) if group.total.pairs]
    blocks += [] if compared else [Text(_nothing_to_compare(model), "notice")]
    for group in compared:
        total = group.total
        where = [text.count(group.ranks, "rank"), *model.machine_if_several(group.machine)]
        meaning = f"geometric mean speed-up of {model.subject} over the best peer of each case"
        remarks = f"Best: {tables.pair_text(total.best)}. Worst: {tables.pair_text(total.worst)}."
        remarks += f" {total.alone} more had no peer." if total.alone else ""
        remarks += f" {total.missing} ran on peers only." if total.missing else ""
        meaning += f": {', '.join([cases_text(total), *where])}."
        blocks += [Headline(text.ratio(total.mean), meaning, Tally(total.verdicts), remarks)]
        blocks += [tables.headlines(group.collectives)]
    if len(model.backends) > 1:
        blocks += [Part([tables.fastest(model)], title="How often each backend is the fastest")]
    return blocks


def _heading(words: str) -> Text:
    return Text(words, "heading")


def _or_note(table: Table, otherwise: str, heading: str = "") -> list[Block]:
    if not table.rows:
        return [Text(otherwise, "note")]
    return [_heading(heading), table] if heading else [table]


def _speedup(model: Model) -> list[Block]:
    page = "Blue: faster; orange: slower. Point at a cell for both times and the interval of the ratio."
    found: list[Block] = []
    for where, table in tables.speedups(model):
        found += [_heading(where), table]
    return [
        Part([Text(page)], only="page"),
        Scale("d", "slower", "faster"),
        Chart("heat", "stack", "speedup_heatmap"),
        Part(found, only="twin"),
    ]


def _distribution(model: Model) -> list[Block]:
    limit = payload.points_per_result(len(model.all_rows))
    every = all(len(row.samples) <= limit for row in model.all_rows)
    shown = "Every sample is shown." if every else words.of_sections(model)["points"]
    page = Part([Text(shown), Chart("pick", "pick")], only="page")
    return [page, Chart("samples", "chart", "distribution")]


def _stability(model: Model) -> list[Block]:
    apart = tables.apart(model)
    between: list[Block] = [_heading("Launches"), Text(words.of_sections(model)["launches"]), apart]
    return [
        Scale("v", "steady", "scattered"),
        Chart("cv", "chart", "stability"),
        *(between if apart.rows else []),
        _heading("Spread"),
        Text(words.of_sections(model)["spread"]),
        Chart("spread-panels", "panels", "spread"),
    ]


def _speed_of_light(model: Model) -> list[Block]:
    ceilings = _or_note(tables.ceilings(model), "These records hold no ceiling.")
    return [*ceilings, Scale("p", "far", "near"), Chart("sol-grid", "chart", "sol")]


def _links(model: Model) -> list[Block]:
    matrices = _matrices(studies.link_matrices(model), "links")
    return [studies.links(model), *matrices] if model.links else []


def _pairs(model: Model) -> list[Block]:
    return _matrices(studies.pair_matrices(model), "pairs")


def _matrices(found: list[Table], picture: str) -> list[Block]:
    scale, twin = Scale("v", "as the best", "worse"), Part([Chart("", picture=picture)], only="twin")
    return [scale, twin, Part(found, style="matrices")] if found else []


def _scaling(model: Model) -> list[Block]:
    blocks: list[Block] = []
    for kind in studies.scaling_kinds(model):
        heading = _heading(f"{kind.capitalize()} scaling: efficiency (median time)")
        chart = Chart(f"efficiency-{kind}", "panels", f"efficiency_{kind}")
        blocks += [heading, chart, studies.scaling(model, kind)]
    return blocks


def _experts(model: Model) -> list[Block]:
    table = studies.experts(model)
    if not table.rows:
        return []
    places = {figure.place for figure in figures.experts(model)}
    drawn = {"experts-time": "experts_time", "experts-bandwidth": "experts_bandwidth"}
    return [*(Chart(place, "panels", drawn[place]) for place in drawn if place in places), table]


def _norms(model: Model) -> list[Block]:
    table = studies.norms(model)
    return [table] if table.rows else []


def _matmuls(model: Model) -> list[Block]:
    chart = [Chart("matmul-bands", "stack", "matmuls")] if matmuls.parts(model) else []
    return [*chart, *matmuls.study(model)]


def _fabric(model: Model) -> list[Block]:
    table = studies.fabric(model)
    return [table] if table.rows else []


def _largest(model: Model) -> list[Block]:
    return [studies.largest(model)] if model.largest else []


def _step_size(step: WorkloadStep) -> str:
    if step.matmul is not None:
        return product_text(step.matmul)
    return text.size(step.bytes) if step.moe is None else text.count(step.moe.tokens, "token")


def _workloads(model: Model) -> list[Block]:
    costs = analysis.workload_costs(model)
    if not costs:
        return [Text("No workload was measured: unisono bench --workload NAME measures one.", "note")]
    blocks: list[Block] = [Part([Chart("", picture="workloads")], only="twin")]
    for number, cost in enumerate(costs):
        work = cost.workload
        steps = ", ".join(
            f"{step.calls:g} × {step.collective} {_step_size(step)} {step.dtype} per {work.unit}"  # noqa: RUF001
            for step in work.steps
        )
        where = f"{payload.slice_text(cost.key, model)} · {steps} · source: {work.source}"
        bars = [Chart(f"workload-{number}", "stack")] if any(item.unit for item in cost.costs) else []
        blocks += [_heading(work.title), Text(where, "note"), *bars, tables.workload(cost)]
    return blocks


def _crossovers(model: Model) -> list[Block]:
    curves = analysis.curves(model)
    single = [curve.only for curve in curves if curve.only]
    parts = text.listing([f"{name} in {single.count(name)}" for name in dict.fromkeys(single)])
    led = f"one backend is never confidently overtaken in {len(single)}: {parts}"
    only = [Text(f"Of {text.count(len(curves), 'curve')}, {led}.")] if single else []
    none = "No library confidently overtakes another in the measured ranges."
    return [*_or_note(tables.crossovers(model), none), *only]


def _results(model: Model) -> list[Block]:
    paper = "The full table is on the page on screen and in report.md."
    page = Part([Chart("result-table"), Text(paper, "paper")], only="page")
    if not model.all_rows:
        return [page]
    same, table = tables.all_results(model)
    folded = Part([table], title=f"All results: {text.count(len(table.rows), 'row')}")
    return [page, Part([Text(f"In every row: {same}. {words.few()}"), folded], only="twin")]


def _failures(model: Model) -> list[Block]:
    return [
        *_or_note(tables.failures(model), "No case failed.", "Failures"),
        *_or_note(tables.skips(model.skips), "Nothing was skipped.", "Skips"),
    ]


def _method(model: Model) -> list[Block]:
    factors = tables.factors(model)
    bus: list[Block] = [_heading("Bus bandwidth factors"), factors]
    return [Terms(words.method(model)), *(bus if factors.rows else [])]


def _provenance(model: Model) -> list[Block]:
    blocks: list[Block] = []
    for source in model.sources:
        for alike in analysis.group_by(source.runs, lambda run: (run.launcher, str(run.libraries))).values():
            run = alike[0]
            command = Text(shlex.join(run.command), "code")
            facts = tables.provenance(source, alike)
            blocks += [_heading(f"Run {run.run_id}"), Text("To reproduce:"), command, facts]
    unknown = "The head of the records could not be read: where they come from is unknown."
    return blocks or [Text(unknown, "note")]


def _always(*blocks: Block) -> Callable[[Model], list[Block]]:
    return lambda model: list(blocks)


# Anchor, title, and what stands below the section's words. A section without blocks is left out.
_SECTIONS: tuple[tuple[str, str, Callable[[Model], list[Block]]], ...] = (
    ("summary", "Summary", _summary),
    ("speedup", "Speed-up", _speedup),
    ("bandwidth", "Bandwidth", _always(Chart("bandwidth-panels", "panels", "bandwidth"))),
    ("latency", "Latency", _always(Chart("latency-panels", "panels", "time"))),
    ("percentiles", "Percentiles", _always(Chart("percentile-table"))),
    ("distribution", "Distribution", _distribution),
    ("stability", "Stability", _stability),
    ("sol", "Speed of light", _speed_of_light),
    ("links", "Links", _links),
    ("pairs", "Pairs", _pairs),
    ("scaling", "Scaling", _scaling),
    ("experts", "Mixture of experts", _experts),
    ("norms", "Fused norms", _norms),
    ("matmuls", "Matmuls with their collective", _matmuls),
    ("fabric", "Fabric", _fabric),
    ("largest", "Largest messages", _largest),
    ("workloads", "Workloads", _workloads),
    ("crossovers", "Crossovers", _crossovers),
    ("results", "All results", _results),
    ("failures", "Failures and skips", _failures),
    ("method", "Method", _method),
    ("provenance", "Provenance", _provenance),
)
_ONLY_PAGE = ("percentiles", "results")  # sections whose words only the page shows
