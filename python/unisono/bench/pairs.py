"""The pairs and patterns of a ping-pong.

half_round_trip: the first rank of a pair sends, and the second answers with as many bytes. The time of a
message is half of that. one_way: the first sends, the second receives. In a queue of calls, messages follow
each other without an answer. bidirectional: both send and receive at once. Bandwidth counts one direction.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from unisono.records import Case
from unisono.records.vocabulary import HALVES, PINGPONG

ALL = "all"

Pair = tuple[int, int]
_PAIR = re.compile(r"(\d{1,6})-(\d{1,6})")


def parse(text: str) -> list[Pair] | None:
    """Returns `0-1,0-3` as pairs, or None for any other text."""
    found = [_PAIR.fullmatch(part.strip()) for part in text.split(",") if part.strip()]
    pairs = [(int(match[1]), int(match[2])) for match in found if match is not None]
    return pairs if pairs and len(pairs) == len(found) else None


def problem(wanted: str, ranks: int) -> str | None:
    """Returns why these pairs cannot be measured on `ranks` ranks, or None. `wanted`: all, halves or a list
    of pairs."""
    if ranks < 2:
        return "a ping-pong needs two ranks: add --ranks 2 or more."
    if wanted == HALVES and ranks % 2:
        return f"--pairs halves needs an even number of ranks, not {ranks}: rank r is paired with r + n/2."
    for first, second in parse(wanted) or []:
        if first == second:
            return f"--pairs {first}-{second}: a rank and itself are no pair."
        if max(first, second) >= ranks:
            return f"--pairs {first}-{second}: the ranks are 0 to {ranks - 1}."
    return None


def select(wanted: str, ranks: int) -> Sequence[Pair | None]:
    """Returns the pairs to measure, each alone; None stands for halves, all at once."""
    if wanted == HALVES:
        return [None]
    return parse(wanted) or list(itertools.combinations(range(ranks), 2))


def peer_of(case: Case, rank: int) -> int | None:
    """Returns the other rank of `rank`'s pair, or None if `rank` takes no part."""
    if case.pair is None:
        return (rank + case.ranks // 2) % case.ranks
    first, second = case.pair
    return {first: second, second: first}.get(rank)


def goes_first(case: Case, rank: int) -> bool:
    """Returns whether `rank` sends first, or alone."""
    return rank < case.ranks // 2 if case.pair is None else rank == case.pair[0]


def sends(case: Case, rank: int) -> bool:
    return peer_of(case, rank) is not None and (case.pattern != "one_way" or goes_first(case, rank))


def receives(case: Case, rank: int) -> bool:
    return peer_of(case, rank) is not None and (case.pattern != "one_way" or not goes_first(case, rank))


def takes_part(case: Case, rank: int) -> bool:
    """Returns whether `rank` takes part; True for any collective."""
    return case.collective != PINGPONG or peer_of(case, rank) is not None


def place_alone(case: Case, rank: int) -> int | None:
    """Returns 0 or 1 for the two ranks of a pair that works alone; None for all others."""
    return case.pair.index(rank) if case.pair is not None and rank in case.pair else None


def messages(case: Case) -> int:
    """Returns the number of consecutive messages in one call, by which its time is divided."""
    return 2 if case.pattern == "half_round_trip" else 1
