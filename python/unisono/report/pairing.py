"""Pairs each result with those of its peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from unisono.records import stats
from unisono.records.stats import Interval, Verdict
from unisono.records.vocabulary import family, sends

from .row import Key, Row


@dataclass(frozen=True)
class Pair:
    """Compares a result with the best of its peers; `others` are the pairs with the other peers. `ratio` is
    the peer's time over the own one: above 1 the own result is faster. From six common launches on, it is the
    median of the launches' ratios, so that what a launch does to both is not in it."""

    own: Row
    peer: Row
    others: tuple[Pair, ...] = ()

    @property
    def sure(self) -> bool:
        """Returns whether both were measured often enough for a verdict."""
        return self.own.interval.sure and self.peer.interval.sure

    @cached_property
    def of_launches(self) -> Interval | None:
        """Returns the median of the launches' ratios and its interval, if the launches are enough for one."""
        found = stats.ratios(self.peer.visit_medians, self.own.visit_medians)
        return found if found is not None and found.sure else None

    @cached_property
    def interval(self) -> Interval:
        """Returns the ratio and how far it may lie from that."""
        own, peer = self.own.interval, self.peer.interval
        return self.of_launches or Interval(
            peer.median / own.median, peer.low / own.high, peer.high / own.low
        )

    @property
    def ratio(self) -> float:
        return self.interval.median

    @property
    def alone(self) -> Verdict:
        """Returns the verdict against this one peer."""
        if self.of_launches:
            return stats.verdict(Interval(1.0, 1.0, 1.0), self.of_launches)
        return stats.verdict(self.own.interval, self.peer.interval)

    @cached_property
    def verdict(self) -> Verdict:
        """Returns FASTER against all peers, SLOWER against any, else the verdict against the best peer."""
        found = [one.alone for one in (self, *self.others)]
        if Verdict.SLOWER in found:
            return Verdict.SLOWER
        return Verdict.UNCLEAR if found[0] is Verdict.FASTER and len(set(found)) > 1 else found[0]


def against_peers(own: Row, peers: Iterable[Row]) -> Pair:
    """Returns a row beside its peers, the fastest first. Two rows are compared over the launches in which
    both ran, if there are any: under another MPI the ranks may be bound to other cores."""
    found = [Pair(*_together(own, peer)) for peer in peers]
    found.sort(key=lambda pair: (pair.ratio, pair.peer.backend))
    return replace(found[0], others=tuple(found[1:]))


def _together(one: Row, other: Row) -> tuple[Row, Row]:
    common = set(one.result.launches) & set(other.result.launches)
    return (one.within(common), other.within(common)) if common else (one, other)


def pairs(
    rows: Iterable[Row], subject: str | None, against: str = "best"
) -> tuple[list[Pair], list[Row], list[Row]]:
    """Returns the subject's rows with their peers, those without, and the best row of each other case.
    `against` names a backend, or is `best`: the peer with the smallest median of each case. Variants of the
    subject (`unisono:two_shot`) are peers only if named, and so is what quantises of what does not. What
    sends nothing is left out."""
    by_case: dict[Key, list[Row]] = {}
    for row in rows:
        if sends(row.key.case):
            by_case.setdefault(row.key, []).append(row)
    matched, alone, missing = [], [], []
    for members in by_case.values():
        own = [row for row in members if row.backend == subject]
        peers = [row for row in members if _is_peer(row, own, subject, against)]
        peers.sort(key=lambda row: (row.interval.median, row.backend))
        if peers:
            matched += [against_peers(row, peers) for row in own]
            missing += [] if own else peers[:1]
        else:
            alone += own
    return matched, alone, missing


def _is_peer(row: Row, own: Iterable[Row], subject: str | None, against: str) -> bool:
    if against != "best":
        return row.backend == against != subject
    alike = all(row.quantises == one.quantises for one in own)
    return alike and family(row.backend) != family(subject or "")
