"""Judges for CI whether a backend keeps up with its peers, as far as the measurement can tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from rich.console import Group, RenderableType

from unisono.records import Failure, stats, text
from unisono.records.vocabulary import case_text

from . import markdown, terminal
from .blocks import Block, Items, Text, left, right, table
from .model import load
from .pairing import Pair, pairs
from .row import Row
from .tables import failure_text, timed


@dataclass
class GateResult:
    """Holds what the gate found; `passed` and `exit_code` follow from it."""

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
        """Returns whether at least one case and the share asked for were judged, and nothing is wrong. Wrong
        is any case that is confidently below, any failure or unchecked result of the backend, a run that was
        cut short, and any line that could not be read."""
        wrong = self.below or self.failures or self.unverified or self.cut or self.left_out or self.few
        return bool(self.checked) and not wrong

    @property
    def cases(self) -> int:
        """Returns the number of all cases, judged or not."""
        return len(self.checked) + len(self.unsure) + len(self.alone) + len(self.missing)

    @property
    def few(self) -> bool:
        """Returns whether a smaller share of the cases was judged than was asked for."""
        return len(self.checked) < self.cases and len(self.checked) / self.cases < self.min_judged

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1

    def summary(self) -> str:
        """Returns the outcome and all its counts, in a few sentences."""
        peer = "the best peer" if self.against == "best" else self.against
        if self.checked:
            mean = text.ratio(stats.geometric_mean([pair.ratio for pair in self.checked]))
            cases = f"{len(self.below)} of {text.count(len(self.checked), 'case')} of {self.backend} are"
            limit = f"confidently below {self.min_ratio:g}× of {peer}"  # noqa: RUF001
            outcome = f"{cases} {limit}; geometric mean {mean}."
        else:
            why = "was measured often enough" if self.unsure else f"has a result of {peer} to compare with"
            outcome = f"no case of {self.backend} {why}."
        judged = f"{len(self.checked)} of {text.count(self.cases, 'case')} were judged"
        few = (
            f"had fewer than {stats.MIN_SAMPLES} visits and were not judged: give the bench a longer --budget"
        )
        counts = (
            (len(self.failures), "failure", f"of {self.backend}"),
            (self.unverified, "result", f"of {self.backend} may be wrong: not checked"),
            (self.cut, "run", "without an end: a case that is not recorded may have ended it"),
            (self.left_out, "line", "could not be read: a failure may stand there"),
            (len(self.unsure), "case", few),
            (len(self.alone), "case", "had no peer and were not judged"),
            (len(self.missing), "case", "ran on peers only and were not judged"),
        )
        return " ".join(
            [
                f"{'Passed' if self.passed else 'Not passed'}: {outcome}",
                *([f"Only {judged}: --min-judged {self.min_judged:g} asks for more."] if self.few else []),
                *(f"{text.count(number, noun)} {what}." for number, noun, what in counts if number),
            ]
        )


def below(pair: Pair, min_ratio: float) -> bool:
    """Returns whether even the optimistic end of the ratio's interval is below `min_ratio`. The ratio is the
    peer's time over the backend's own. Its optimistic end takes the upper end of the peer's 95 % interval of
    the median and the lower end of the backend's. Equality is not below."""
    return pair.interval.high < min_ratio


def gate(
    path: Path,
    backend: str = "unisono",
    against: str = "best",
    min_ratio: float = 1.0,
    min_judged: float = 0.0,
) -> GateResult:
    """Judges every case of `backend` in the records at `path`, sweep and workloads alike.

    Its peer is `against`, or with `best` every other library; variants such as `unisono:two_shot` are no
    peers of `unisono`. A case is confidently below if `below` says so against any peer, also one whose median
    is not the smallest. A case is judged if it is below, or if its own result and that of the best peer have
    intervals: to keep up with slower peers decides nothing.
    Not passing: see GateResult.passed. Cases with too few visits, without a peer, or that only peers ran are
    counted; they decide only if they leave less than the share `min_judged` of all.
    Throws: what `load` throws; ValueError for a ratio that is not positive or a share outside 0 to 1."""
    if not min_ratio > 0:
        raise ValueError(f"the minimum ratio is {min_ratio}: it must be greater than 0.")
    if not 0 <= min_judged <= 1:
        raise ValueError(f"the minimum share of judged cases is {min_judged}: it must be from 0 to 1.")
    model = load(path)
    found = GateResult(backend, against, min_ratio, min_judged)
    compared, found.alone, found.missing = pairs(model.all_rows, backend, against)
    for pair in compared:
        lost = next((one for one in (pair, *pair.others) if one.sure and below(one, min_ratio)), None)
        if lost is not None:
            found.below.append(lost)
        decisive = lost or pair
        (found.checked if decisive.sure else found.unsure).append(decisive)
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


def _blocks(result: GateResult) -> list[Block]:
    """Returns the outcome, every case that is below, and every failure."""
    blocks: list[Block] = [Text(result.summary(), "bold green" if result.passed else "bold red")]
    blocks += [Items("", result.notes, "yellow")]
    grid = table(
        result.below,
        right("Ratio", lambda pair: f"{pair.ratio:.3f}×"),  # noqa: RUF001  (a thousandth below 1 counts)
        right("At best", lambda pair: f"{pair.interval.high:.3f}×"),  # noqa: RUF001
        left("Case", lambda pair: case_text(pair.own.key.case, pair.own.key.workload)),
        *timed("Own", "Own 95 %", attrgetter("own.interval")),
        left("Peer", lambda pair: pair.peer.backend),
        *timed("Peer time", "Peer 95 %", attrgetter("peer.interval")),
    )
    blocks += [grid] if result.below else []
    failures = [f"failed: {failure_text(failure)}" for failure in result.failures]
    return [*blocks, Items("", failures, "red")]


def render_markdown(result: GateResult) -> str:
    """Returns the outcome as Markdown."""
    return markdown.document("Gate", _blocks(result))


def render(result: GateResult) -> RenderableType:
    """Returns the outcome for a terminal."""
    return Group(*terminal.rendered(_blocks(result)))
