"""Reading records: every line that holds one, and a sentence about every line that does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .schema import SCHEMA_VERSION, Ceiling, End, Failure, Largest, Link, Record, Result, Run, Skip, Workload
from .writing import FILE_NAME

FILES = "records*.jsonl"  # what is read below a directory
_decoder = msgspec.json.Decoder(Record)


@dataclass
class Records:
    """All that could be read of one or more records files, and a sentence for every line that could not."""

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

    @property
    def empty(self) -> bool:
        """Whether no line held a record."""
        return not any(found for name, found in vars(self).items() if name != "problems")

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
    """The records files of `path`: itself, or those below a directory (several runs make one report)."""
    found = [path] if path.is_file() else sorted(path.rglob(FILES))
    if not found:
        raise FileNotFoundError(
            f"no {FILE_NAME} in {path}: run `unisono bench -O DIR` first, or name its directory."
        )
    return found


def _major(version: str) -> str:
    return version.partition(".")[0]


def read(path: Path) -> Records:
    """Reads every line that holds a record of this schema's major version; `problems` names the others."""
    records = Records()
    for file in files(path):
        with open(file, "rb") as lines:
            _read_lines(file, lines, records)
    return records


def _read_lines(file: Path, lines: Iterable[bytes], records: Records) -> None:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _decoder.decode(line)
        except msgspec.MsgspecError as error:
            cut = "" if line.endswith(b"\n") else " (the file ends in the middle of it)"
            records.problems.append(f"{file.name} line {number} was left out{cut}: {error}")
            continue
        if isinstance(record, Run) and _major(record.schema) != _major(SCHEMA_VERSION):
            raise ValueError(
                f"{file} has schema {record.schema}, this is {SCHEMA_VERSION}: read it with the version "
                "that wrote it."
            )
        records.add(record)
