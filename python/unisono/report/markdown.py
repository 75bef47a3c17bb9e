"""report.md: the page's twin for a repository, an issue or a terminal. The same records give the same
bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.records import text

from . import analysis, content, method, payload, studies
from .content import Table
from .model import Model

_md = text.markdown
_IMAGES = {
    "speedup_heatmap": "Speed-up",
    "bandwidth": "Bandwidth",
    "latency": "Latency",
    "distribution": "Distribution",
    "stability": "Stability",
    "spread": "Stability",
    "sol": "Speed of light",
    "links": "Links",
    "pairs": "Pairs",
    "efficiency": "Scaling",
    "workloads": "Workloads",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> list[str]:
    """A Markdown table; every cell is escaped."""
    right = set(numeric)
    lines = [
        f"| {' | '.join(map(_md, head))} |",
        f"| {' | '.join('---:' if i in right else '---' for i in range(len(head)))} |",
    ]
    return [*lines, *(f"| {' | '.join(map(_md, row))} |" for row in rows), ""]


def code(value: str) -> str:
    """A code block that no content can end early."""
    fence = "```"
    while fence in value:
        fence += "`"
    return f"{fence}\n{value}\n{fence}"


def _table(t: Table) -> list[str]:
    return table(t.head, t.rows, t.numeric)


def render(model: Model, images: Sequence[str]) -> str:
    """The report as Markdown; `images` are the names of the plots that lie beside it."""
    lines = ["# Unisono bench report", "", _md(content.lead(model)), ""]
    if started := content.started(model):
        lines += [f"Started {_md(started)}.", ""]
    for notice in content.notices(model):
        lines += [f"**{_md(notice.title)}**", "", *(f"- {_md(item)}" for item in notice.items), ""]
    lines += _summary(model)
    lines += _section("Speed-up", images) + _speedups(model)
    lines += _section("Bandwidth", images) + _section("Latency", images)
    lines += _section("Distribution", images)
    lines += _section("Stability", images)
    lines += _section("Speed of light", images) + _table(content.ceilings(model))
    for study in studies.studies(model):
        lines += _study(study, images)
    lines += _section("Workloads", images) + _workloads(model)
    lines += _section("Crossovers", images) + _crossovers(model)
    lines += _section("All results", images) + _results(model)
    lines += _section("Failures and skips", images) + _failures(model)
    lines += _section("Method", images) + _method(model)
    lines += _section("Provenance", images) + _provenance(model)
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, images: Sequence[str]) -> list[str]:
    lines = [f"## {title}", ""]
    for image in images:
        stem = image.removesuffix(".png")
        if any(
            stem == name or stem.startswith(f"{name}_")
            for name, section in _IMAGES.items()
            if section == title
        ):
            lines += [f"![{stem.replace('_', ' ')}]({image})", ""]
    return lines


def _summary(model: Model) -> list[str]:
    lines = ["## Summary", ""]
    if reason := content.why_no_headline(model):
        lines += [_md(reason), ""]
    for group in analysis.groups(model):
        if group.total.pairs:
            total = group.total
            where = f"{content.cases_text(total)}, {_md(content.group_title(model, group))}"
            lines += [
                f"**{_md(text.ratio(total.mean))}** geometric mean speed-up of {_md(model.subject)} over the "
                f"best peer of each case: {where}.",
                "",
                *table(
                    content.HEADLINE_HEAD,
                    map(content.headline_cells, [total, *group.collectives]),
                    range(1, 7),
                ),
            ]
    if len(model.backends) > 1:
        lines += _table(content.fastest_counts(model))
    return lines


def _speedups(model: Model) -> list[str]:
    """For each slice a table of collective by size: ratio, own time and the best peer's."""
    lines = []
    cells = [cell for cell in payload.heat(model) if cell["ratio"] is not None]
    names = "machine ranks device processes mode memory placement dtype scaling workload".split()

    def where(cell: payload.Json) -> tuple[object, ...]:
        return tuple(cell[name] for name in names)

    for members in analysis.group_by(cells, where).values():
        lines += [f"### {_md(payload.in_common(members, model))}", ""]
        columns = sorted({(cell["column"], cell["t_column"]) for cell in members})
        rows = []
        for (name, op, root, pair), own in analysis.group_by(
            members, lambda c: (c["collective"], c["op"], c["root"], c["pair"])
        ).items():
            by_column = {cell["column"]: cell for cell in own}
            label = " ".join(str(part) for part in (name, op, f"root {root}" if root else None, pair) if part)
            rows.append([label, *(_cell(by_column.get(column)) for column, _ in columns)])
        lines += table(["Collective", *(word for _, word in columns)], rows, range(1, len(columns) + 1))
    return lines


def _cell(cell: payload.Json | None) -> str:
    return "" if cell is None else f"{cell['cell']} ({cell['own']}; {cell['t_peer']})"


def _results(model: Model) -> list[str]:
    head = [
        "Case",
        "Backend",
        "Algorithm",
        "Median",
        "95 % interval",
        "Min",
        "p95",
        "p99",
        "Max",
        "algbw GB/s",
        "busbw GB/s",
        "SoL",
        "Variation",
    ]
    head += ["Samples", "Converged", "Verified"]
    columns = payload.shared_columns(model.all_rows)
    rows = []
    for row in model.all_rows:
        r = payload.result(row, columns)
        case = f"{r['collective']} {r['size']} {r['dtype'] or ''} {r['op'] or ''}"
        more = f", workload {row.key.workload}" if row.key.workload else ""
        line = [
            f"{' '.join(case.split())}, {content.slice_text(row.key, model)}{more}",
            row.backend,
            r["algorithm"],
        ]
        times = ("t_median", "t_interval", "t_min", "t_p95", "t_p99", "t_max")
        line += [r[n] for n in (*times, "t_algbw", "t_busbw", "t_sol", "t_cv")]
        rows.append([*line, str(r["n"]), "yes" if r["converged"] else "no", r["bound"]])
    return [_md(method.few()), "", *_folded("All results", head, rows, range(3, 14))]


def _folded(title: str, head: Sequence[str], rows: list[list[str]], numeric: Iterable[int]) -> list[str]:
    if not rows:
        return ["None.", ""]
    summary = f"<details><summary>{title}: {text.count(len(rows), 'row')}</summary>"
    return [summary, "", *table(head, rows, numeric), "</details>", ""]


def _study(study: studies.Study, images: Sequence[str]) -> list[str]:
    lines = [*_section(study.title, images), _md(study.words), ""]
    for heading, _, found in study.tables:
        lines += [*([f"### {_md(heading)}", ""] if heading else []), *_table(found)]
    for matrix in study.matrices:
        lines += [f"### {_md(matrix.title)}", ""]
        head = ["from \\ to", *matrix.names]
        named = zip(matrix.names, matrix.cells, strict=True)
        rows = [[name, *(cell[0] for cell in cells)] for name, cells in named]
        lines += table(head, rows, range(1, len(head)))
    return lines


def _workloads(model: Model) -> list[str]:
    lines = []
    for cost in analysis.workload_costs(model):
        lines += [f"### {_md(cost.workload.title)}", ""]
        lines += [f"{_md(content.slice_text(cost.key, model))}; source: {_md(cost.workload.source)}", ""]
        lines += _table(content.workload_table(cost))
    return lines or ["No workload was measured.", ""]


def _crossovers(model: Model) -> list[str]:
    found = content.crossovers(model)
    lines = (
        _table(found)
        if found.rows
        else ["No library confidently overtakes another in the measured ranges.", ""]
    )
    rest = content.uncrossed(model)
    return [*lines, *([_md(rest), ""] if rest else [])]


def _failures(model: Model) -> list[str]:
    failures, skips = content.failures(model), content.skips(model.skips)
    lines = _table(failures) if failures.rows else ["No case failed.", ""]
    return [*lines, *(_table(skips) if skips.rows else ["Nothing was skipped.", ""])]


def _method(model: Model) -> list[str]:
    lines = [f"- **{_md(term)}**: {_md(words)}" for term, words in method.paragraphs(model)]
    return [*lines, "", *table(["Collective", "busbw / algbw, n ranks", "Here"], method.factors(model))]


def _provenance(model: Model) -> list[str]:
    lines = []
    for title, facts, command in content.provenance(model):
        lines += [f"### {_md(title)}", "", "To reproduce:", "", code(command), "", *_table(facts)]
    return lines or ["The head of the records could not be read: where they come from is unknown.", ""]
