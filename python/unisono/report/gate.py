"""A gate for CI: does a backend keep up with its peers, as far as the measurement can tell?"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from unisono.records import Failure, stats, text
from unisono.records.vocabulary import case_text

from . import content
from .markdown import table as markdown_table
from .model import Pair, Row, load, pairs

_HEAD = ["Ratio", "At best", "Case", "Own", "Own 95 %", "Peer", "Peer time", "Peer 95 %"]


@dataclass
class GateResult:
    """What the gate found; `passed` and `exit_code` follow from it."""

    backend: str
    against: str
    min_ratio: float
    min_judged: float = 0.0
    checked: list[Pair] = field(default_factory=list)
    below: list[Pair] = field(default_factory=list)  # confidently below min_ratio, the worst first
    unsure: list[Pair] = field(default_factory=list)  # of too few visits: not judged
    alone: list[Row] = field(default_factory=list)  # cases of the backend without a peer: not judged
    # a peer's results in cases that the backend has no result of
    missing: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)  # of the backend
    unverified: int = 0  # its results that were not checked after they had been measured
    left_out: int = 0  # lines that could not be read, in which a failure may stand
    cut: int = 0  # runs without an end: what ended them may be a case that is not recorded
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """At least one case and the share asked for were judged, none is confidently below, the backend
        failed in none, all its results were checked, no run was cut short, and every line could be read."""
        wrong = self.below or self.failures or self.unverified or self.cut or self.left_out or self.few
        return bool(self.checked) and not wrong

    @property
    def cases(self) -> int:
        """Judged and not judged."""
        return len(self.checked) + len(self.unsure) + len(self.alone) + len(self.missing)

    @property
    def few(self) -> bool:
        """Whether a smaller share of the cases was judged than was asked for."""
        return len(self.checked) < self.cases and len(self.checked) / self.cases < self.min_judged

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios; NaN without any."""
        return stats.geometric_mean([pair.ratio for pair in self.checked])

    def summary(self) -> str:
        """The outcome and all its counts, in a few sentences."""
        peer = "the best peer" if self.against == "best" else self.against
        head = "Passed" if self.passed else "Not passed"
        if not self.checked:
            why = "was measured often enough" if self.unsure else f"has a result of {peer} to compare with"
            parts = [f"{head}: no case of {self.backend} {why}."]
        else:
            cases = f"{len(self.below)} of {text.count(len(self.checked), 'case')}"
            limit = f"confidently below {self.min_ratio:g}× of {peer}"  # noqa: RUF001
            mean = text.ratio(self.mean)
            parts = [f"{head}: {cases} of {self.backend} are {limit}; geometric mean {mean}."]
        if self.few:
            judged = f"{len(self.checked)} of {text.count(self.cases, 'case')} were judged"
            parts.append(f"Only {judged}: --min-judged {self.min_judged:g} asks for more.")
        if self.failures:
            parts.append(f"{text.count(len(self.failures), 'failure')} of {self.backend}.")
        if self.unverified:
            results = text.count(self.unverified, "result")
            parts.append(f"{results} of {self.backend} may be wrong: not checked.")
        if self.cut:
            runs = text.count(self.cut, "run")
            parts.append(f"{runs} without an end: a case that is not recorded may have ended it.")
        if self.left_out:
            lines = text.count(self.left_out, "line")
            parts.append(f"{lines} could not be read: a failure may stand there.")
        if self.unsure:
            few = f"{text.count(len(self.unsure), 'case')} had fewer than {stats.MIN_SAMPLES} visits"
            parts.append(f"{few} and were not judged: give the bench a longer --budget.")
        if self.alone:
            parts.append(f"{text.count(len(self.alone), 'case')} had no peer and were not judged.")
        if self.missing:
            parts.append(f"{text.count(len(self.missing), 'case')} ran on peers only and were not judged.")
        return " ".join(parts)


def below(pair: Pair, min_ratio: float) -> bool:
    """Whether even the optimistic end of the ratio's interval is below `min_ratio`: peer.high / own.low <
    min_ratio.

    The ratio is the peer's time over the backend's own; its optimistic end takes the upper end of the peer's
    95 % interval of the median and the lower end of the backend's. Equality is not below."""
    return pair.high < min_ratio


def gate(
    path: Path,
    backend: str = "unisono",
    against: str = "best",
    min_ratio: float = 1.0,
    min_judged: float = 0.0,
) -> GateResult:
    """Judges every case of `backend` in the records at `path`, sweep and workloads alike.

    Its peer is `against`, or with `best` each other library (variants such as `unisono:two_shot` are not
    peers of `unisono`): a case is confidently below where it is so, as `below` says, against any peer, also
    one whose median is not the smallest. It is judged where that is found, or where its own result and the
    peer's of the smallest median have intervals: that it keeps up with slower ones decides nothing. An
    interval that reaches `min_ratio` is not below. Not passing: any case confidently below, any failure,
    wrong or unchecked result of `backend`, a run that was cut short, or nothing to judge. Cases of too few
    visits for an interval, without a peer, or that only peers ran are counted and decide only where they
    leave less than the share `min_judged` of all. Raises what `load` raises, and ValueError for a ratio that
    is not positive or a share that is none."""
    if not min_ratio > 0:
        raise ValueError(f"the minimum ratio is {min_ratio}: it must be greater than 0.")
    if not 0 <= min_judged <= 1:
        raise ValueError(f"the minimum share of judged cases is {min_judged}: it must be from 0 to 1.")
    model = load(path)
    found = GateResult(backend, against, min_ratio, min_judged)
    compared, found.alone, found.missing = pairs(model.all_rows, backend, against)
    for pair in compared:
        each = [pair, *(Pair(pair.own, peer) for peer in pair.others)]
        lost = next((one for one in each if one.sure and below(one, min_ratio)), None)
        if lost is not None:
            found.below.append(lost)
        told = lost or pair
        (found.checked if told.sure else found.unsure).append(told)
    found.below.sort(key=lambda pair: (pair.ratio, pair.own.id))
    found.failures = [failure for _, failure in model.failures if failure.backend == backend]
    for name in dict.fromkeys([backend, *([against] if against != "best" else [])]):
        if name not in model.backends:
            found.notes.append(
                f"The records hold no result of {name}: they hold {text.listing(model.backends)}."
            )
    found.cut = sum(source.state == "cut short" for source in model.sources)
    found.left_out = model.left_out
    unfinished = [source for source in model.sources if source.state != "complete"]
    found.notes += [f"{s.name} is {s.state}: only what it holds was judged." for s in unfinished]
    unchecked = [row.backend for row in model.all_rows if row.unchecked]
    found.unverified = unchecked.count(backend)
    found.notes += model.unchecked
    found.notes += text.shortened(model.problems)
    rest = len(model.failures) - len(found.failures)
    if rest:
        found.notes.append(f"{text.count(rest, 'failure')} of other backends do not decide.")
    return found


def _cells(pair: Pair) -> list[str]:
    own, peer = pair.own.interval, pair.peer.interval
    case = case_text(pair.own.key.case, pair.own.key.workload)
    times = [text.time(own.median), text.span(own.low, own.high)]
    return [
        f"{pair.ratio:.3f}×",  # noqa: RUF001  (one that is below by a part in a thousand counts)
        f"{pair.high:.3f}×",  # noqa: RUF001
        case,
        *times,
        pair.peer.backend,
        text.time(peer.median),
        text.span(peer.low, peer.high),
    ]


def render_markdown(result: GateResult) -> str:
    """The outcome as Markdown, with every case that is below and every failure."""
    md = text.markdown
    lines = ["# Gate", "", md(result.summary()), "", *(f"- {md(note)}" for note in result.notes), ""]
    if result.below:
        lines += markdown_table(_HEAD, map(_cells, result.below), (0, 1, 3, 4, 6, 7))
    lines += [f"- failed: {md(content.failure_text(failure))}" for failure in result.failures]
    return "\n".join(lines).rstrip() + "\n"


def render(result: GateResult) -> RenderableType:
    """The outcome for a terminal."""
    style = "bold green" if result.passed else "bold red"
    parts: list[RenderableType] = [Text(text.plain(result.summary()), style=style)]
    parts += [Text(text.plain(note), style="yellow") for note in result.notes]
    if result.below:
        grid = RichTable(box=None, pad_edge=False, header_style="bold")
        for i, name in enumerate(_HEAD):
            grid.add_column(name, justify="left" if i in (2, 5) else "right", no_wrap=i != 2)
        for pair in result.below:
            grid.add_row(*(Text(text.plain(cell)) for cell in _cells(pair)))
        parts.append(grid)
    parts += [Text(text.plain(f"failed: {content.failure_text(f)}"), style="red") for f in result.failures]
    return Group(*parts)
