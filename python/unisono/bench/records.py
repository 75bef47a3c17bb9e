"""The records of a bench run: JSON Lines, one tagged object a line, written as they are measured.

The first line is a `Run`; results, ceilings, skips and failures follow in the order in which they were
measured; an `End` closes a run that was not cut short. Times are in microseconds, bandwidths in GB/s (1e9
bytes per second), sizes in bytes.
`unisono schema` prints the JSON Schema of a line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from unisono.errors import ResourceError

SCHEMA_VERSION = "1.4"  # 1.1: devices, links, largest; 1.2: nodes, pingpong, streams, scaling; 1.3: memory;
# 1.4: a sample from the first start to the last end
FILE_NAME = "records.jsonl"
FILES = "records*.jsonl"  # what is read below a directory


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same on any number of ranks."""

    kind: str  # weak or strong
    bytes: int  # that a rank (weak), or all ranks together (strong), bring


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, whoever does it. `bytes` is the larger buffer of the call, as in nccl-tests."""

    collective: str
    bytes: int
    dtype: str
    op: str | None
    ranks: int
    root: int | None = None
    placement: str = "out_of_place"  # or in_place
    memory: str = "plain"  # or symmetric
    mode: str = "latency"  # or throughput; on GPUs also graph and events
    device: str = "cpu"  # or cuda: where the buffers lie
    one_process: bool = False  # the ranks are threads of one process, not processes
    pattern: str | None = None  # of a pingpong: half_round_trip, one_way or bidirectional
    pair: tuple[int, int] | None = None  # that is measured alone; None: all at once, rank r with r + n/2
    streams: str | None = None  # one or per-peer: an all_to_all built of sends and receives
    scaling: Scaling | None = None  # a point of `unisono scaling`


class Machine(msgspec.Struct, kw_only=True):
    """Where it ran. Never a host name."""

    cpu: str
    cores: int
    memory_bytes: int
    numa_nodes: int
    kernel: str
    caches: dict[str, int]
    gpus: list[str] = []  # names of those that the ranks use
    driver: str | None = None
    gpu_state: list[str] = []  # of each GPU at the start: clocks, temperature, reasons for throttling


class Run(msgspec.Struct, tag="run", kw_only=True):
    """The head of a records file: provenance of everything below it."""

    schema: str
    run_id: str
    started_at: str  # UTC, ISO 8601
    command: list[str]
    preset: str | None
    seed: int
    ranks: int
    launcher: str
    machine: Machine
    libraries: dict[str, str]
    environment: dict[str, str]  # an allow-list, never all of it
    commit: str | None
    nodes: list[int] = []  # of each rank, the number of its node; empty: all are on one


class Ceiling(msgspec.Struct, tag="ceiling", kw_only=True):
    """A measured limit of the hardware: `copy_one_thread`, `copy_all_threads` (bytes copied over time); on
    GPUs `ring` (bytes that leave each GPU over time, all sending to the next, by the fastest engine); with
    --fabric `fabric_pair` (one rank writes to one other, alone) and `fabric_line` (what a NIC states)."""

    name: str
    bytes: int
    gbps: float
    samples_gbps: list[float]


NOT_CHECKED = "not checked"  # the bound of a result that the user left unchecked (`unisono bench -c 0`)


class Verification(msgspec.Struct, kw_only=True):
    """Checked on fresh random data with poisoned outputs, before and after the timed part."""

    before: bool
    after: bool
    bound: str  # "bit-exact" or the stated bound
    detail: str | None = None


class Result(msgspec.Struct, tag="result", kw_only=True):
    """One case on one backend. A sample is one iteration (latency, events) of all ranks, or a queue of calls
    divided by its length (throughput, graph); of a half_round_trip half of that. See `timing`."""

    case: Case
    backend: str
    algorithm: str | None
    samples_us: list[float]
    median_us: float
    # the exact nonparametric 95 % interval of the median, or that of the visits' medians where it reaches
    # further; below 6 samples or visits minimum to maximum, which covers less
    ci_low_us: float
    ci_high_us: float
    # median over iterations of the spread of the ranks' start times; None on GPUs and across machines
    skew_us: float | None
    calls_per_sample: int
    verification: Verification
    algbw_gbps: float
    busbw_gbps: float
    ceiling_gbps: float | None
    sol: float | None  # speed of light: the share of the ceiling that busbw reaches, as stated in the report
    converged: bool
    workload: str | None = None
    sms: int | None = None  # of a GPU, that the call takes; None where the library does not say
    staged: bool = False  # on GPUs: through the host's memory
    memory: str | None = None  # host, pinned (the host's) or device, where ways of a run differ in it
    wire_bits: float | None = None  # of an element between ranks, where it does not travel as it is
    visits: list[int] = []  # samples_us came in so many visits, each with so many samples


class Skip(msgspec.Struct, tag="skip", kw_only=True):
    """A backend, or a case on a backend, that could not run here, and why."""

    backend: str
    reason: str
    case: Case | None = None


class Failure(msgspec.Struct, tag="failure", kw_only=True):
    """A case that raised or whose result was wrong; it makes the exit code 1."""

    backend: str
    case: Case
    rank: int | None
    message: str


class WorkloadStep(msgspec.Struct, kw_only=True):
    """`calls` calls of one collective at one size, within one unit (layer, token, step) of a workload."""

    collective: str
    bytes: int
    dtype: str
    op: str | None
    calls: float


class Link(msgspec.Struct, tag="link", kw_only=True):
    """What the links between GPUs carry in one pattern, by one engine. `pair`: `source` sends to `target`
    alone; `ring`: every GPU to the next; `all_pairs`: every GPU to every other at once. `gbps` is what leaves
    each sending GPU. `round_trip` has a time instead: a flag to the other GPU and back."""

    engine: str  # copy_engine, sm_load, sm_store, bulk_store or flag
    pattern: str  # pair, ring, all_pairs or round_trip
    devices: int
    bytes: int  # of one transfer
    source: int | None = None  # of pair and round_trip
    target: int | None = None
    blocks: int | None = None  # of a kernel
    gbps: float | None = None
    round_trip_us: float | None = None
    samples: list[float]  # in the unit of the value


class Largest(msgspec.Struct, tag="largest", kw_only=True):
    """The largest size of a collective that a backend ran before the memory was full
    (`unisono bench --to-memory-limit`)."""

    case: Case
    backend: str
    time_us: float
    used_bytes: int  # of the fullest GPU, while it ran
    total_bytes: int  # of that GPU
    stopped: str  # why there is no larger one, in a sentence


class Workload(msgspec.Struct, tag="workload", kw_only=True):
    """The collectives of a real model; its cases are results whose `workload` names it."""

    name: str
    title: str
    unit: str  # "token", "layer", "step"
    units_per_step: int  # e.g. layers
    source: str
    steps: list[WorkloadStep]


class End(msgspec.Struct, tag="end", kw_only=True):
    """The last line of a run that finished or was interrupted in good order."""

    finished_at: str
    elapsed_s: float
    interrupted: bool
    gpu_state: list[str] = []  # as in Machine, at the end


Record = Run | Ceiling | Link | Largest | Result | Skip | Failure | Workload | End
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class RecordsWriter:
    """Appends records to `directory`/records.jsonl, a whole line and a flush each: a cut loses one line. What
    the disk refuses is a ResourceError, which names the file; what comes after it is not written."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE_NAME
        self._file: IO[bytes] = open(self.path, "xb")  # noqa: SIM115  (closed in close)

    def write(self, record: Record) -> None:
        if self._file.closed:
            return
        with self._writing():
            self._file.write(_encoder.encode(record) + b"\n")
            self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            with self._writing():
                os.fsync(self._file.fileno())
                self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()  # would fail again, later
            raise ResourceError(
                f"{self.path} cannot be written: {error.strerror}. It holds what was recorded until then."
            ) from error


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


def schema() -> dict[str, Any]:
    """JSON Schema of one line of a records file."""
    return msgspec.json.schema(Record)
