"""The records of a bench run: JSON Lines, one tagged object a line, written as they are measured.

The first line is a `Run`. Results, ceilings, skips and failures follow in the order in which they were
measured. An `End` closes a run that was not cut short. Each launch of the ranks appends such lines; results
of one case and backend then belong together (`derived.joined`). Times are in microseconds, bandwidths in GB/s
(1e9 bytes per second), sizes in bytes. `unisono schema` prints the JSON Schema of a line.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA_VERSION = "1.10"  # 1.1: devices, links, largest; 1.2: nodes, pingpong, streams, scaling; 1.3: memory;
# 1.4: a sample from the first start to the last end; 1.5: mixture of experts;
# 1.6: fused norms; 1.7: launches; 1.8: fused matmuls; 1.9: offsets, errors of quantised results;
# 1.10: inputs


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that stay the same on any number of ranks."""

    kind: str  # weak or strong
    bytes: int  # of each rank (weak), or of all ranks together (strong)


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: tokens, and how they are routed. Every rank has as many tokens and experts."""

    tokens: int  # of each rank
    hidden: int  # elements of a token
    experts: int  # of all ranks
    top_k: int  # experts of a token
    routing: str  # uniform, zipf (exponent 1.2) or one_hot (all to one rank)
    layout: str  # of what a rank receives: expert_major or flat
    seed: int  # of the routes
    remote_bytes: int  # of Case.bytes, without the rows that stay on their rank


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """A fused norm: an all_reduce of rows, the residual, the norm, and perhaps a quantisation."""

    rows: int
    hidden: int  # elements of a row
    quant: str  # of the normalised rows: none or fp8_128


class Matmul(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's matmul of [m, k] and [k, n]. Of all_gather_matmul each rank brings its share of the m rows."""

    m: int
    k: int
    n: int


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A call to measure, on any backend. `bytes` is the size of its larger buffer, as in nccl-tests. Of
    moe_dispatch and moe_combine it is what the rank with the most rows receives and sends back, a row for
    each token and rank; of moe_round both. Of all_reduce_rms_norm it is x of one rank, of a
    fused matmul what its collective alone has, of a matmul alone its product."""

    collective: str
    bytes: int
    dtype: str
    op: str | None
    ranks: int
    root: int | None = None
    placement: str = "out_of_place"  # or in_place
    memory: str = "plain"  # or symmetric
    offset: int = 0  # bytes from the start of a page at which each buffer begins
    inputs: str = "kept"  # or written: by each rank before each call, as programs do
    mode: str = "latency"  # or throughput; on GPUs also graph and events
    device: str = "cpu"  # or cuda: where the buffers lie
    one_process: bool = False  # the ranks are threads of one process, not processes
    pattern: str | None = None  # of a pingpong: half_round_trip, one_way or bidirectional
    pair: tuple[int, int] | None = None  # of ranks, alone; None: all pairs at once, rank r with r + n/2
    streams: str | None = None  # one or per-peer: an all_to_all built of sends and receives
    scaling: Scaling | None = None  # a point of `unisono scaling`
    moe: Moe | None = None  # of moe_dispatch, moe_combine and moe_round
    norm: Norm | None = None  # of all_reduce_rms_norm
    matmul: Matmul | None = None  # of all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce and matmul


class Machine(msgspec.Struct, kw_only=True):
    """The machine of a run. Never a host name."""

    cpu: str
    cores: int
    memory_bytes: int
    numa_nodes: int
    kernel: str
    caches: dict[str, int]
    gpus: list[str] = []  # names of the GPUs that the ranks use
    driver: str | None = None
    gpu_state: list[str] = []  # of each GPU at the start: clocks, temperature, reasons for throttling


class Run(msgspec.Struct, tag="run", kw_only=True):
    """The head of a records file: the provenance of all lines that follow."""

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
    environment: dict[str, str]  # the variables of an allow-list
    commit: str | None
    nodes: list[int] = []  # the node's number of each rank; empty: all ranks are on one node
    launch: int = 0  # its number from 1 on, if the ranks are started several times; 0: not known, before 1.7
    launches: int = 0  # how often the ranks are started for these records


class Ceiling(msgspec.Struct, tag="ceiling", kw_only=True):
    """A measured limit of the hardware.

    `copy_one_thread`, `copy_all_threads`: bytes copied over time. `ring`, on GPUs: bytes that leave each GPU
    over time while each sends to the next, by the fastest engine; `copy`, on one GPU: bytes copied within its
    memory over time. `fabric_pair`, with --fabric: one rank
    writes to one other, alone. `fabric_line`: the line rate that a NIC states."""

    name: str
    bytes: int
    gbps: float
    samples_gbps: list[float]


NOT_CHECKED = "not checked"  # the bound of a result that the user left unchecked (`unisono bench -c 0`)


class Verification(msgspec.Struct, kw_only=True):
    """The checks on fresh random data with poisoned outputs, before and after the timed part."""

    before: bool
    after: bool
    bound: str  # "bit-exact" or the stated bound
    error: float | None = None  # the largest error of a quantised result, as a share of the bound
    detail: str | None = None


class Result(msgspec.Struct, tag="result", kw_only=True):
    """One case on one backend. A sample is one iteration of all ranks (latency, events), or a queue of calls
    divided by its length (throughput, graph). A sample of a half_round_trip is half of that. See `timing`."""

    case: Case
    backend: str
    algorithm: str | None
    samples_us: list[float]
    median_us: float
    # The exact nonparametric 95 % interval of the median, widened to that of the visits' medians, or of the
    # launches' medians if there are several. Below 6: minimum to maximum, with less confidence.
    ci_low_us: float
    ci_high_us: float
    # the median, over iterations, of the spread of the ranks' start times; None on GPUs and across machines
    skew_us: float | None
    calls_per_sample: int
    verification: Verification
    algbw_gbps: float
    busbw_gbps: float
    ceiling_gbps: float | None
    sol: float | None  # speed of light: the share of the ceiling that busbw reaches
    converged: bool
    workload: str | None = None
    sms: int | None = None  # SMs of a GPU that the call takes; None: the library does not say
    staged: bool = False  # on GPUs: through the host's memory
    memory: str | None = None  # host, pinned (the host's) or device, if the ways of a run differ in it
    wire_bits: float | None = None  # bits of an element between ranks, if not the element's own
    visits: list[int] = []  # the number of samples of each visit, in the order of samples_us
    launches: list[int] = []  # the launch of each visit; empty: not known, before 1.7


class Skip(msgspec.Struct, tag="skip", kw_only=True):
    """A backend, or a case on a backend, that could not run, and why."""

    backend: str
    reason: str
    case: Case | None = None


class Failure(msgspec.Struct, tag="failure", kw_only=True):
    """A case that raised, or that gave a wrong result. Makes the exit code 1."""

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
    moe: Moe | None = None
    matmul: Matmul | None = None


class Link(msgspec.Struct, tag="link", kw_only=True):
    """The bandwidth of the links between GPUs in one pattern, by one engine.

    `pair`: `source` alone sends to `target`. `ring`: every GPU sends to the next. `all_pairs`: every GPU
    sends to every other at once. `gbps` counts the bytes that leave each sending GPU. `round_trip` has a time
    instead: of a flag to the other GPU and back."""

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
    """The largest size, to within 2 %, of a collective that a backend ran before the memory was full
    (`unisono bench --to-memory-limit`)."""

    case: Case
    backend: str
    time_us: float
    used_bytes: int  # on the fullest GPU, while the case ran
    total_bytes: int  # of that GPU
    stopped: str  # why no larger size ran, in a sentence


class Workload(msgspec.Struct, tag="workload", kw_only=True):
    """The collectives of a real model. Results whose `workload` names the model are its cases."""

    name: str
    title: str
    unit: str  # "token", "layer", "step"
    units_per_step: int  # e.g. layers
    source: str
    steps: list[WorkloadStep]


class End(msgspec.Struct, tag="end", kw_only=True):
    """The last line of a launch that finished, or that stopped cleanly after an interrupt."""

    finished_at: str
    elapsed_s: float
    interrupted: bool
    launch: int = 0  # as in Run
    barrier_us: list[
        float
    ] = []  # the bench's own barrier at the start and the end: the distance of the cores
    gpu_state: list[str] = []  # as in Machine, at the end


Record = Run | Ceiling | Link | Largest | Result | Skip | Failure | Workload | End


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of one line of a records file."""
    return msgspec.json.schema(Record)
