"""Holds the prose of the report: what each section shows, how it was measured, and what the words mean."""

from __future__ import annotations

import itertools

from unisono.records import stats

from . import matmuls, payload, studies
from .model import Model

# The anchor of a section or a term on a line of its own, its words below it, an empty line between two.
_SECTIONS = """
speedup
Median time of the best peer over that of {subject}, for each collective and size, with {subject}'s own
median. ≈ in front: neither is confidently the faster.

bandwidth
Bus bandwidth over message size; the band is the {confidence:.0f} % interval of the median, the dashed line
the measured ceiling where the run has one.

latency
Median time per call over message size, both axes logarithmic, with the band of its {confidence:.0f} %
interval.

percentiles
Of the samples of each result in the selection. {few}

distribution
All samples of one case: box plot (quartiles, median, whiskers to the last sample within 1.5 quartile
distances, the rest as points) and cumulative share.

points
The curve and the points show {points} samples of each result, evenly spaced in rank, minimum and maximum
included; box and whiskers come from all of them.

stability
Coefficient of variation of the samples of each result.

launches
How far the launches' medians of a case lie apart: largest less smallest, over their median.

spread
Minimum to maximum (thin) and quartiles (thick) of the samples over their median, for at most ten sizes.

sol
Bus bandwidth as a share of the ceiling that the same run measured. A result in a cache can exceed a memory
copy.

links
What the links between the GPUs carry, measured by one process that drives all of them: the time of the
slowest GPU, from a common start. {matrix}

pairs
Ping-pong of each pair of ranks alone: half a round trip at the smallest size, bandwidth of one direction at
the largest. {matrix}

scaling
Efficiency against the fewest ranks measured, with the {confidence:.0f} % intervals of both times as a band.
At 100 % a call takes as long (weak: every rank brings the same bytes), or its time falls as the ranks grow
(strong: all ranks together bring the same bytes).

experts
Time per call, and the bandwidth of the rows that come from other ranks with the measured ceiling, over the
tokens of each rank. GB/s counts all rows of the rank that receives the most, a row for each token and rank;
the speed-up is against the best peer.

norms
Time per call by the rows that are summed. The speed-up over Unisono's own variants comes first (apart: its
all_reduce, then the rest on every rank), then that over the best peer.

matmuls
The chart has times over that of the matmul alone. The band begins where all of the shorter part would be
hidden and ends where both parts follow each other. Overlap is {subject}'s: the times of both parts less that
of the call, over that of the shorter part; unclear if it may be off by more than {points_off} points.
Speed-ups are over its own variants (apart: the collective as a whole and the matmul as a whole) and over the
best peer.

fabric
Bus bandwidth counts the blocks for all other ranks. {share} Ways that could not run here are under Failures
and skips, with the reason.

largest
The largest size that ran before the memory was full, and why the next larger one did not.

crossovers
Sizes at which one library overtakes another, confidently on both sides: an estimate between two neighbouring
sizes, or the range in which neither is confidently the faster.

results
Every result of these records, workloads included. Click a heading to sort; words in the box narrow the table
down.
"""
_METHOD = """
One run, many backends
All backends of a run use the same buffers and the same clock. The run measures its cases in several rounds,
in a fresh random order each. The backends of a case follow each other directly and equally often, so that
drift of the machine reaches all alike.

Sample
The time of one iteration, from the first rank's start to the last rank's end. The clocks of several machines
differ: there, and in records of a schema before 1.4, a sample is the longest of the ranks' own times. The
longest own time is less if ranks share a core and start apart. In latency mode the ranks meet at a barrier,
which is not timed, and complete each call before the next. In throughput mode a queue of calls is timed as a
whole and divided by its length. The records keep every sample. Skew is the median spread of the ranks' start
times.

Sample on GPUs
Graph mode times one run of a CUDA graph of calls between two events, divided by the calls. Events mode times
one call between two events. Before either, all GPUs wait for one word of host memory, which is written when
every rank has queued its work. So launches are not in the time, no library takes part in the start, and the
GPUs start within about a microsecond. In latency mode the host clock times a call until the stream is done,
in throughput mode a queue of calls. Warm-up calls come first, and a graph is captured once.

Same buffers
On GPUs nccl runs on the buffers of unisono, plain and symmetric. nccl-windows and torch-symm take only memory
that they have allocated. Their symmetric cases use buffers of their own, of the same size and alignment, with
the same data and the same checks. Multicast through the switch (NVLS) is off for all unless the environment
below says otherwise. MPI that is not CUDA-aware is staged: the copies to and from pinned host memory are part
of its time.

Verified
Fresh random data and poisoned outputs are checked before and after the timed part: bit by bit if the
semantics are exact, else within the stated bound. A library that quantises is held to the bound that it
states. The check before is of a single call. The check after is, out of place, of what was timed: the graph,
or the queue of calls. All its calls read the same input and write the same output, and the check compares the
final output. So a call that does less than its share, or returns before its data has arrived, goes unseen if
another call of the queue brings the same bytes in time. A barrier leaves no data: before and after, one rank
enters a single call 20 ms late, and no other rank may leave earlier. A wrong result is a failure, not a time.

Median and interval
The median with its exact nonparametric {confidence:.0f} % interval: two order statistics, for any
distribution. Samples taken right after each other are not independent. The interval therefore also covers the
interval of the medians of the visits in which they were taken. Below {least} samples or visits the interval
is minimum to maximum, which covers less. If the ranks were started several times, the unit is the launch: the
median is that of the launches' medians, and from {least} launches on so is the interval. Converged: the
interval became as narrow as was asked before the time ran out.

Verdict
FASTER or SLOWER: the intervals do not overlap and the medians differ by more than 2 %. SAME: both intervals
lie within 2 % of each other. UNCLEAR: anything else, also if either result has fewer than {least} visits. If
both ran in {least} launches or more, the interval of the launches' ratios is judged against 1 in the same
way, since a launch is good or bad for both. No verdict is forced. Against several peers, SLOWER than any is
SLOWER, and only FASTER than all is FASTER.

Gate
The command unisono gate has no such tolerance. A case is confidently below a ratio if the upper end of any
peer's interval over the lower end of the backend's own is below the ratio, by however little; of {least}
launches or more, the upper end of the interval of the launches' ratios. A run that was cut short does not
pass.

Speed-up
The median time of the best peer over that of {subject} in the same case: above 1, {subject} is faster. The
best peer is the other library with the smallest median in that very case. If the ranks were started several
times, two libraries are compared over the launches in which both ran. Only the geometric mean sums up
ratios, and the absolute times stand beside them.

algbw, busbw
algbw is bytes over the median time; bytes is the larger buffer of the call, as in nccl-tests. busbw is algbw
times a factor that makes it comparable with the speed of the hardware for any number of ranks. The table
below has the factors, from nccl-tests' doc/PERFORMANCE.md and sources. GB/s is 1e9 bytes per second; sizes
are powers of 1024.

SoL
Speed of light: busbw over the ceiling, a limit of the hardware that the same run measured. On a CPU the
ceiling is copy_all_threads divided by the ranks that work (2 for a pair alone). Data that stays in a cache
can exceed it. On GPUs the ceiling is ring: the bandwidth out of each GPU when every GPU sends to the next, by
the fastest of copy engine, loads, stores and bulk copies; on one GPU it is copy, how fast that copies within
its memory. If an all_reduce quantises (unisono:fp8, unisono:int8), busbw counts elements as they lie in
memory, and SoL counts the bits on the wire, which stand beside the algorithm. With --fabric the ceiling is
the line rate of a rank's NIC if the provider states one. Else the ceiling is fabric_pair (one rank writes to
one other, alone) divided by the ranks. Pairs do not have to share that rate, so that SoL may exceed 100 %.

Percentiles
p95 and p99 are shown only if their own exact {confidence:.0f} % interval exists: from {p95} and {p99} samples
on. Otherwise there is a dash.

Variation
The coefficient of variation: standard deviation over mean of a result's samples. Minimum and maximum are
those of all samples; none is discarded.

Crossover
One of two libraries is confidently the faster at one size, the other at the next size at which that can be
said. Between neighbouring sizes the estimate is the point at which the curves meet, interpolated on
logarithmic axes. If neither is confidently the faster at sizes in between, only their range is named.

Ping-pong
Half round trip: the first rank sends, the second answers with as many bytes, and the time is half of that. In
throughput mode the round trips follow each other. One way: the first rank sends and the second receives,
without an answer. In throughput mode a library may have several such messages under way. Bidirectional: both
send and receive at once, and bandwidth is that of one direction. Each pair runs alone while the other ranks
sleep. The pair halves is all pairs at once, rank r with r + n/2.

Sends and receives
An all_to_all of that name consists of the library's own sends and receives: MPI's and gloo's Isend and Irecv
of all blocks, Unisono's batch of them, NCCL's as one group. On a stream per peer each has a communicator of
its own, and all streams fork from and join the one that is timed.

Scaling
t(n) is the median time on n ranks, n0 the fewest ranks measured. Weak efficiency is t(n0) / t(n); every rank
brings the same bytes on any number of ranks (J. L. Gustafson, Reevaluating Amdahl's law, CACM 31(5), 1988).
Strong efficiency is n0 t(n0) / (n t(n)); all ranks together bring the same bytes, each an equal part (G. M.
Amdahl, Validity of the single processor approach, AFIPS 1967). On one rank a collective is a copy. A rank
brings its input; in broadcast and scatter only the root brings bytes. The interval takes the far ends of both
times. Each library is compared with itself, so that a library that is slow on few ranks may look efficient:
the times stand beside.

Mixture of experts
moe_dispatch starts with a rank's tokens, top k and weights, and ends with the rows of its experts, by
(expert, source rank, token); flat rows are one for each token with an expert on the rank, by (source rank,
token). moe_combine starts with a result for each such row and ends with the tokens' weighted sums; those of
flat rows have no weights. moe_round is both, with the rows themselves as results. Routes are by a seed of
their own, the same in every run: uniform, Zipf of exponent 1.2, or one hot, which sends all tokens to one
rank. All that follows from the top k is part of the time, except in moe_combine. Bytes count a token once for
each rank with an expert of its own, on the rank with the most, in moe_round both ways. algbw counts all of
them, busbw those from other ranks. One rank alone has none, and its share of the ceiling is of half of what
it reads and writes. mpi permutes with numpy, gloo and nccl with torch around an all_to_all. They too send a
token once to each rank, and sum on the experts' ranks; nccl has its routes and counts beforehand. async-ep
(torchtitan's MinimalAsyncEP) sends a token once to each expert. torch, moe-ops and te (Transformer Engine's
Triton kernels) permute on one GPU. Their sums are held to a bound, since they add in another order. On GPUs
caches are not flushed between calls, and SMs are those of the largest kernel in a graph.

Fused norms
all_reduce_rms_norm sums rows over the ranks, adds the residual, and normalises each row of that sum by its
root mean square; both are results. fp8_128 also quantises the normalised rows, with a scale of each 128
elements. Bytes are those of one rank's rows, and the bus bandwidth is an all_reduce's of as many.
unisono:apart gives the same bits by an all_reduce and a pass of each rank over all rows. gloo and nccl add
in place, so that a copy of the rows comes first; torch's rms_norm follows, whose result stays where torch has
put it.
mpi has its Allreduce, then numpy in memory made beforehand. Results of the peers are held to a bound, since
they add in another order.

Matmuls with their collective
Every rank multiplies A of [m, k] by B of [k, n]. all_gather_matmul gathers A first, of which a rank has its
share of the rows; matmul_reduce_scatter and matmul_all_reduce add up the ranks' products. Unisono does both
chunk by chunk. unisono:apart is the same call with one chunk: the collective as a whole and the matmul as a
whole, one after the other, as gloo's and nccl's with torch.mm. torch-async-tp is torch.ops.symm_mem's fused
form. The matmul alone is torch.mm, judges no library and counts in no speed-up. Bytes and bus bandwidth are
those of the collective. Checks are on small integers, whose products have no rounding; timed are random
numbers, since a GPU multiplies ones with less power and faster. On CPUs a rank has one core, on which nothing
hides.

Workload
The time of one unit is the sum of calls times the median at each size. Its interval adds the ends of the
intervals, which is wider than {confidence:.0f} %. Best of each takes the fastest backend for each call.
"""


def _least(quantile: float) -> int:
    """Returns how many samples carry an exact interval of that quantile."""
    return next(count for count in itertools.count(1) if stats.ranks_of(count, quantile))


def few() -> str:
    """Says what a dash in place of a percentile means."""
    return f"A dash: so few samples carry no such percentile (p95 needs {_least(0.95)}, p99 {_least(0.99)})."


_LINE_RATE = "The line rate is that of a rank's NIC, as its provider states it."
_PAIR_SHARE = (
    "A pair's share is what one pair of ranks writes alone (fabric_pair), divided by the ranks. Pairs do not "
    "have to share that rate, so that more than 100 % is possible."
)


def _filled(model: Model, prose: str) -> list[tuple[str, str]]:
    values = {
        "confidence": 100 * stats.CONFIDENCE,
        "least": stats.MIN_SAMPLES,
        "p95": _least(0.95),
        "p99": _least(0.99),
        "few": few(),
        "subject": model.subject or "the subject",
        "points_off": f"{50 * matmuls.CERTAIN:.0f}",
        "points": payload.points_per_result(len(model.all_rows)),
        "share": _LINE_RATE if studies.has_line_rate(model) else _PAIR_SHARE,
        "matrix": "Rows send, columns receive; the colour says how much worse a pair is than the best one.",
    }
    split = (block.split("\n", 1) for block in prose.strip().split("\n\n"))
    return [(term, " ".join(words.split()).format(**values)) for term, words in split]


def method(model: Model) -> list[tuple[str, str]]:
    """Returns terms with their explanations."""
    return _filled(model, _METHOD)


def of_sections(model: Model) -> dict[str, str]:
    """Returns the words of each section by its anchor."""
    return dict(_filled(model, _SECTIONS))
