"""Reads records: every line that holds one, and a sentence about every line that does not.

A records file may come from anywhere. A sentence about a wrong line names its file and number, and the other
lines stay usable. Control characters never leave this module. Medians, intervals and bandwidths of a result
are computed from its samples again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from . import derived
from .schema import SCHEMA_VERSION, Ceiling, End, Failure, Largest, Link, Record, Result, Run, Skip, Workload
from .text import printable
from .vocabulary import DTYPES, MATMUL, MATMULS, MOES, NORM, PATTERNS, PINGPONG, case_text
from .writing import FILE_NAME

FILES = "records*.jsonl"  # the files that are read below a directory
_decoder = msgspec.json.Decoder(Record)
# Bytes of a line that may hold a character that is not printable: an escape, or a byte beyond ASCII.
_SUSPICIOUS = re.compile(rb"\\[ubf]|[\x7f-\xff]")


@dataclass
class Records:
    """The records of one or more files.

    Attributes:
        problems: a sentence for every line that was left out or changed.
        left_out: how many lines were left out. Any of them may have been a failure.
    """

    runs: list[Run] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    largest: list[Largest] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    workloads: list[Workload] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left_out: int = 0

    @property
    def empty(self) -> bool:
        """Returns whether no line held a record."""
        return not any(found for name, found in vars(self).items() if name not in ("problems", "left_out"))

    def add(self, record: Record) -> None:
        where: dict[type, list[Any]] = {
            Run: self.runs,
            Ceiling: self.ceilings,
            Link: self.links,
            Largest: self.largest,
            Result: self.results,
            Skip: self.skips,
            Failure: self.failures,
            Workload: self.workloads,
            End: self.ends,
        }
        where[type(record)].append(record)


def files(path: Path) -> list[Path]:
    """Returns the records files of `path`: a file itself, or all below a directory (several runs make one
    report). Raises FileNotFoundError if there is none."""
    found = [path] if path.is_file() else sorted(path.rglob(FILES))
    if not found:
        raise FileNotFoundError(
            f"no {FILE_NAME} in {path}: run `unisono bench -O DIR` first, or name its directory."
        )
    return found


def name_of(file: Path, path: Path) -> str:
    """Returns the name of `file`, one of `files(path)`, in messages."""
    return file.relative_to(path if path.is_dir() else path.parent).as_posix()


def read(path: Path) -> Records:
    """Returns the records of every file of `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the schema has another major version.
    """
    records = Records()
    for file in files(path):
        read_file(file, name_of(file, path), records)
    return records


def read_file(file: Path, name: str, records: Records, begin: int = 0) -> None:
    """Adds the records of one file, from byte `begin` on, to `records`. Problems call the file `name`."""
    with open(file, "rb") as lines:
        lines.seek(begin)
        _read_lines(file, name, lines, records)


def _read_lines(file: Path, name: str, lines: Iterable[bytes], records: Records) -> None:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            record, changed = _decoded(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            cut = "" if line.endswith(b"\n") else " (the file ends in the middle of it)"
            records.problems.append(f"{where} was left out{cut}: {printable(str(error))}")
            records.left_out += 1
            continue
        if isinstance(record, Run) and _major(record.schema) != _major(SCHEMA_VERSION):
            raise ValueError(
                f"{file} has schema {record.schema}, this is {SCHEMA_VERSION}: read it with the version "
                "that wrote it."
            )
        if changed:
            records.problems.append(
                f"{where}: its control characters are replaced by \N{REPLACEMENT CHARACTER}."
            )
        if (wrong := _wrong(record)) is not None:
            records.problems.append(f"{where} was left out: {wrong}.")
            records.left_out += 1
            continue
        if isinstance(record, Result):
            record, difference = derived.from_samples(record)
            if difference is not None:
                records.problems.append(f"{where}: {difference}; what was computed counts.")
        records.add(record)


def _major(version: str) -> str:
    return version.partition(".")[0]


def _decoded(line: bytes) -> tuple[Record, bool]:
    """Returns the record of a line, and whether characters were replaced."""
    if _SUSPICIOUS.search(line) is None:
        return _decoder.decode(line), False
    raw = msgspec.json.decode(line)
    clean = _clean(raw)
    return msgspec.convert(clean, Record), clean != raw


def _clean(value: Any) -> Any:
    """Returns a JSON value in which every character of a text is printable, a new line or a tab."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): _clean(item) for key, item in value.items()}
    return value


def _wrong(record: Record) -> str | None:
    """Returns why a record cannot be used, or None."""
    if isinstance(record, Result | Failure | Skip | Largest) and record.case is not None:
        case, name = record.case, f"{record.backend} on {record.case.collective}"
        if case.dtype not in DTYPES:
            return f"{name} has dtype {case.dtype!r}, which is none of {', '.join(DTYPES)}"
        if case.collective == PINGPONG and case.pattern not in PATTERNS:
            return f"{name} has pattern {case.pattern!r}, which is none of {', '.join(PATTERNS)}"
        if (case.moe is not None) != (case.collective in MOES):
            return f"{name} has {'a' if case.moe else 'no'} mixture of experts"
        if (case.norm is not None) != (case.collective == NORM):
            return f"{name} has {'a' if case.norm else 'no'} fused norm"
        if (case.matmul is not None) != (case.collective in (*MATMULS, MATMUL)):
            return f"{name} has {'a' if case.matmul else 'no'} matmul"
        if case.ranks < 1 or case.bytes < 0:
            return f"{name} has {case.ranks} ranks and {case.bytes} bytes"
    if isinstance(record, Result):
        what = f"the result of {record.backend} on {case_text(record.case, record.workload)}"
        if not record.samples_us or min(record.samples_us) <= 0:
            return f"{what} holds no samples, or some that are no positive times"
        if record.visits and (min(record.visits) < 1 or sum(record.visits) != len(record.samples_us)):
            return f"{what} holds {len(record.samples_us)} samples, and its visits do not add up to them"
        if record.launches and len(record.launches) != len(record.visits):
            return f"{what} holds {len(record.visits)} visits, and launches of {len(record.launches)}"
    return None
