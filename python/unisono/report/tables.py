"""Makes the tables of the report, before any of them becomes HTML, Markdown or lines of a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import numpy as np

from unisono.records import Case, Ceiling, Failure, Run, Skip, text, vocabulary
from unisono.records.stats import Interval, Verdict
from unisono.records.vocabulary import MOES, case_text, product_text, shape_text, size_text, title

from . import analysis, payload
from .analysis import Cost, Headline, WorkloadCost, group_by
from .blocks import VERDICTS, Cell, Column, T, Table, Tally, left, right, table
from .model import Model, Source
from .pairing import Pair


def timed(
    title: str, interval_title: str, interval: Callable[[T], Interval | None]
) -> tuple[Column[T], Column[T]]:
    """Returns a column of medians and one of their intervals."""

    def cell(item: T, words: Callable[[Interval], str]) -> str:
        found = interval(item)
        return words(found) if found else text.MISSING

    return (
        right(title, lambda item: cell(item, lambda i: text.time(i.median))),
        right(interval_title, lambda item: cell(item, lambda i: text.span(i.low, i.high))),
    )


def failure_text(failure: Failure) -> str:
    where = "" if failure.rank is None else f", rank {failure.rank}"
    return f"{failure.backend}: {case_text(failure.case)}{where}: {failure.message}"


def pair_text(pair: Pair) -> str:
    """Returns a ratio with its case and times: `2.10× at all_reduce 4 KiB f32 sum, 2 ranks, latency, plain
    (6.20 µs, mpi 13.0 µs)`."""  # noqa: RUF002
    key = pair.own.key
    return f"{text.ratio(pair.ratio)} at {case_text(key.case, key.workload)} ({_times(pair)})"


def _times(pair: Pair) -> str:
    own, peer = pair.own.interval, pair.peer.interval
    return f"{text.time(own.median)}, {pair.peer.backend} {text.time(peer.median)}"


def headlines(lines: Sequence[Headline]) -> Table:
    """Returns a row for each headline: mean, cases, verdicts, best and worst case."""
    return table(
        lines,
        left("Collective", lambda line: line.title),
        right("Geometric mean", _mean),
        right("Cases", lambda line: str(len(line.pairs) or line.alone)),
        left(" · ".join(VERDICTS), lambda line: Tally(line.verdicts) if line.pairs else ""),
        left("Best case", lambda line: pair_text(line.best) if line.pairs else _unpaired(line)),
        left("Worst case", lambda line: pair_text(line.worst) if line.pairs else ""),
    )


def _mean(line: Headline) -> Cell | str:
    return Cell(text.ratio(line.mean), "num strong") if line.pairs else text.MISSING


def _unpaired(line: Headline) -> str:
    return "no peer ran it" if line.alone else "not run"


def fastest(model: Model) -> Table:
    """Counts how often each backend is confidently the fastest, over the cases that at least two ran."""
    winners = [winner for curve in analysis.curves(model) for winner in curve.winners]
    counts = dict.fromkeys([*model.backends, "none confidently"], 0)
    for winner in winners:
        counts[winner.own.backend if winner.verdict is Verdict.FASTER else "none confidently"] += 1
    return table(
        counts.items(),
        left("Fastest backend", lambda item: item[0]),
        right("Cases", lambda item: str(item[1])),
        right("Share", lambda item: f"{100 * item[1] / len(winners):.0f} %" if winners else text.MISSING),
    )


def apart(model: Model) -> Table:
    """Returns for each backend how far the launches' medians of its cases lie apart, if there are several."""
    rows = [row for row in model.all_rows if row.launches > 1]
    return table(
        group_by(rows, lambda row: row.backend).items(),
        left("Backend", lambda item: item[0]),
        right("Cases", lambda item: str(len(item[1]))),
        right("Launches", lambda item: _numbers(row.launches for row in item[1])),
        right("Median of the cases", lambda item: text.percent(float(np.median([r.apart for r in item[1]])))),
        right(
            "90th percentile", lambda item: text.percent(float(np.quantile([r.apart for r in item[1]], 0.9)))
        ),
    )


def speedups(model: Model) -> Iterable[tuple[str, Table]]:
    """Returns for each slice a table of collective by size: ratio, own time and the best peer's."""
    cells = [cell for cell in payload.heat(model) if cell["ratio"] is not None]
    places = "machine ranks device processes mode memory placement offset inputs shape dtype scaling workload"
    for members in group_by(cells, lambda cell: tuple(cell[name] for name in places.split())).values():
        sizes = sorted({(cell["column"], cell["t_column"]) for cell in members})
        lines = group_by(members, lambda c: (c["collective"], c["op"], c["root"], c["pair"]))
        rows = []
        for (name, op, root, pair), own in lines.items():
            by_size = {c["column"]: f"{c['cell']} ({c['own']}; {c['t_peer']})" for c in own}
            head = [name, op or "", f"root {root}" if root else "", pair or ""]
            rows.append([" ".join(filter(None, head)), *(by_size.get(size, "") for size, _ in sizes)])
        heads = ["Collective", *(words for _, words in sizes)]
        yield payload.in_common(members, model), Table(heads, rows, frozenset(range(1, len(heads))))


def all_results(model: Model) -> tuple[str, Table]:
    """Returns what is the same in all results, and the table of them."""
    rows = payload.results(model)
    found = payload.columns_of(rows)
    columns = [
        (heading, number is not None, lambda row, name=name: payload.cell(row[name]))
        for heading, name, number in found["columns"]
    ]
    return found["same"], table(rows, *columns)


def ceilings(model: Model) -> Table:
    """Returns what each run measured, before its cases and again after them."""
    items: list[tuple[Source, str, Ceiling]] = []
    for (index, _), members in group_by(model.ceilings, lambda item: (item[0], item[1].name)).items():
        source = model.sources[index]
        items += [(source, ("start", "end")[number % 2], c) for number, (_, c) in enumerate(members)]
    return table(
        items,
        left("Ceiling", lambda item: item[2].name),
        left("Records", lambda item: item[0].name),
        right("Ranks", lambda item: _numbers(run.ranks for run in item[0].runs)),
        left("Of the run's", lambda item: item[1]),
        right("Size", lambda item: text.size(item[2].bytes)),
        right("GB/s", lambda item: text.gbps(item[2].gbps)),
        right("Range of its samples", lambda item: _range(item[2].samples_gbps, text.gbps)),
    )


def _numbers(values: Iterable[int]) -> str:
    return text.listing([str(value) for value in sorted(set(values))])


def _range(values: Sequence[float], words: Callable[[float], str]) -> str:
    return f"{words(min(values))} to {words(max(values))}" if values else text.MISSING


def crossovers(model: Model) -> Table:
    """Returns where one library overtakes another: at a size, or somewhere in a range."""
    return table(
        [(curve, crossing) for curve in analysis.curves(model) for crossing in curve.crossovers],
        left("Collective", lambda item: _name(item[0].key.case)),
        left("Where", lambda item: payload.slice_text(item[0].key, model)),
        left("Faster up to", lambda item: _winner(item[1].left)),
        left("Faster from", lambda item: _winner(item[1].right)),
        right("Overtaken at", lambda item: _meeting(item[1])),
    )


def _meeting(crossing: analysis.Crossover) -> str:
    cases = crossing.left.own.key.case, crossing.right.own.key.case
    if crossing.estimate is not None:
        return f"≈ {size_text(cases[0], round(crossing.estimate))}"
    return " to ".join(map(size_text, cases))


def _name(case: Case) -> str:
    return " ".join(part for part in (title(case), case.dtype, case.op, shape_text(case)) if part)


def _winner(pair: Pair) -> str:
    return f"{pair.own.backend}, {size_text(pair.own.key.case)} ({_times(pair)})"


def workload(cost: WorkloadCost) -> Table:
    """Returns a workload's time per unit and per step on each backend, and what the best of each saves."""
    unit, many = cost.workload.unit, cost.workload.units_per_step

    tokens = max((step.moe.tokens for step in cost.workload.steps if step.moe is not None), default=0)

    def per_token(item: Cost) -> str:
        return text.time(item.unit.median / tokens) if item.unit else text.MISSING

    def whole(item: Cost) -> str:
        return text.time(item.unit.median * many) if item.unit else text.MISSING

    return table(
        cost.costs,
        left("Backend", lambda item: item.backend),
        *timed(f"Per {unit}", "95 % interval", attrgetter("unit")),
        *([right(f"{many} {unit}s", whole)] if many > 1 else []),
        *([right(f"Per {unit} and token of a rank", per_token)] if tokens else []),
        right("Saved by the best of each", lambda item: _saved(cost, item)),
        left("Choice per collective", lambda item: _choices(cost, item)),
    )


def _saved(cost: WorkloadCost, item: Cost) -> str:
    saved = cost.saved(item)
    if saved is None or item.unit is None:
        return text.MISSING
    return f"{text.time(saved)} ({text.percent(saved / item.unit.median)})" if saved > 0 else "0"


def _choices(cost: WorkloadCost, item: Cost) -> str:
    steps = list(zip(cost.workload.steps, item.parts, strict=True))
    if item.unit is None:
        return f"not measured: {text.listing([step.collective for step, row in steps if row is None])}"
    parts = []
    for step, row in steps:
        assert row is not None
        by = f" on {row.backend}" if item is cost.mix else ""
        by += f" ({row.result.algorithm})" if row.result.algorithm else ""
        size = size_text(row.key.case) if step.matmul is None else product_text(step.matmul)
        call = f"{step.calls:g} × {step.collective} {size}"  # noqa: RUF001
        parts.append(f"{call}: {text.time(row.interval.median)}{by}")
    return "; ".join(parts)


def failures(model: Model) -> Table:
    return table(
        model.failures,
        left("Backend", lambda item: item[1].backend),
        left("Case", lambda item: ", ".join([case_text(item[1].case), *model.machine_if_several(item[0])])),
        left("Rank", lambda item: payload.cell(item[1].rank)),
        left("Message", lambda item: item[1].message),
    )


def skips(found: Sequence[Skip]) -> Table:
    """Returns a row for each backend and reason."""
    return table(
        group_by(found, lambda skip: (skip.backend, skip.reason)).items(),
        left("Backend", lambda item: item[0][0]),
        left("What", lambda item: _skipped(item[1])),
        left("Reason", lambda item: item[0][1]),
    )


def _skipped(members: Sequence[Skip]) -> str:
    cases = [skip.case for skip in members if skip.case is not None]
    if len(cases) < len(members):
        return "everything"
    if len(cases) == 1:
        return case_text(cases[0])
    names = list(dict.fromkeys(case.collective for case in cases))
    return f"{text.count(len(cases), 'case')} of {text.listing(names)}"


def factors(model: Model) -> Table:
    """Returns each measured collective's bus bandwidth factor: a formula in n ranks, and its values."""
    cases = [row.key.case for row in model.all_rows]
    ranks = sorted({case.ranks for case in cases})
    measured = {case.collective for case in cases}

    def here(name: str) -> str:
        if name in MOES:
            shares = sorted({vocabulary.bus_factor_of(case) for case in cases if case.collective == name})
            return " to ".join(text.digits(share) for share in dict.fromkeys((shares[0], shares[-1])))
        return ", ".join(
            f"{text.digits(vocabulary.bus_factor(name, n))} ({text.count(n, 'rank')})" for n in ranks
        )

    return table(
        [name for name in vocabulary.KNOWN if name in measured],
        left("Collective", str),
        left("busbw / algbw, n ranks", lambda name: vocabulary.KNOWN[name].formula),
        left("Here", here),
    )


def provenance(source: Source, alike: Sequence[Run]) -> Table:
    """Returns what is known about a run. `alike`: its launches with the same libraries."""
    run, numbers = alike[0], {one.launch for one in alike}
    ends = [end for end in source.ends if end.launch in numbers]
    m, end = run.machine, ends[-1] if ends else None
    launches = (
        f"{text.listing(list(map(str, sorted(numbers))))} of {run.launches}" if run.launches > 1 else ""
    )
    nodes = [str(run.nodes.count(node)) for node in sorted(set(run.nodes))]
    spread = f" on {len(nodes)} nodes ({text.listing(nodes)})" if nodes else ""
    caches = ", ".join(f"{name} {text.size(count)}" for name, count in m.caches.items())
    libraries = ", ".join(f"{name} {version}" for name, version in run.libraries.items())
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in run.environment.items())
    facts = {
        "Records": f"{source.name}, {source.state}",
        "Started": text.moment(run.started_at),
        "Launches": launches,
        "Took": text.duration(sum(end.elapsed_s for end in ends)) if ends else "unknown",
        "Ranks": f"{run.ranks}{spread}, launched by {run.launcher}",
        "Preset, seed": f"{run.preset or 'none'}, {run.seed}",
        "Processor": f"{m.cpu}, {text.count(m.cores, 'core')}, {text.count(m.numa_nodes, 'NUMA node')}",
        "Memory, caches": f"{text.size(m.memory_bytes)}; {caches or 'caches unknown'}",
        "GPUs, driver": f"{text.listing(m.gpus)}; {m.driver or 'no driver'}",
        "GPUs at the start": "; ".join(m.gpu_state),
        "GPUs at the end": "; ".join(end.gpu_state) if end else "",
        "Kernel": m.kernel,
        "Libraries": libraries or "none",
        "Environment": environment or "nothing set",
        "Commit": run.commit or "unknown",
        "Schema, run": f"{run.schema}, {run.run_id}",
    }
    return Table(["What", "Value"], [[name, value] for name, value in facts.items() if value], style="facts")
