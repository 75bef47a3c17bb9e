"""The table of `unisono bench --fabric`: every way of the fabric lane and its peers on the same cases."""

from __future__ import annotations

from unisono.records import text
from unisono.records.vocabulary import DTYPES

from .content import Table
from .model import Model, Row


def rows(model: Model) -> list[Row]:
    """The results on all cases of which a way of the fabric lane has one, by case, the fastest first."""
    cases = {row.key for row in model.all_rows if row.backend.startswith("fabric:")}
    chosen = [row for row in model.all_rows if row.key in cases]
    return sorted(chosen, key=lambda row: (row.key.case.collective, row.key.case.bytes, row.interval.median))


def table(model: Model) -> Table:
    """Empty where no such run was recorded. Count: elements of one block. Gbit/s: what a rank sends to all
    others (bus bandwidth in bits)."""
    found = []
    for row in rows(model):
        case, result = row.key.case, row.result
        found.append(
            [
                f"{case.collective} {text.size(case.bytes)}",
                f"{case.bytes // DTYPES[case.dtype].itemsize // case.ranks:,}",
                row.backend,
                result.memory or "host",
                text.digits(8 * result.busbw_gbps),
                text.gbps(result.busbw_gbps),
                text.percent(result.sol),
                text.time(row.interval.median),
                text.span(row.interval.low, row.interval.high),
            ]
        )
    head = [
        "Size",
        "Count",
        "Way",
        "Memory",
        "Gbit/s per rank",
        "Bus bandwidth GB/s",
        "Of the line rate" if _has_line_rate(model) else "Of a pair's share",
        "Latency",
        "95 % interval",
    ]
    return Table(head, found, frozenset(range(1, len(head))) - {2, 3})


def ceiling_text(model: Model) -> str:
    """What the share in the table is of, in a sentence."""
    what = (
        "The line rate is that of a rank's NIC, as its provider states it"
        if _has_line_rate(model)
        else "A pair's share is what one pair of ranks writes alone (fabric_pair), divided by the ranks: "
        "pairs do not have to share that rate, so that more than 100 % is possible"
    )
    return (
        f"Bus bandwidth counts the blocks for all other ranks. {what}. Ways that could not "
        "run here are under Failures and skips, with the reason."
    )


def _has_line_rate(model: Model) -> bool:
    return any(ceiling.name == "fabric_line" for _, ceiling in model.ceilings)
