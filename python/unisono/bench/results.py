"""Makes the record of a cell."""

from __future__ import annotations

import numpy as np

from unisono.bench import ceilings
from unisono.bench.cells import Work
from unisono.records import Result, Verification, derived


def result_of(work: Work, verification: Verification, ceiling_gbps: float | None, launch: int) -> Result:
    """Returns the record of a cell with at least one sample. Bandwidths are those of the median.
    `ceiling_gbps`: the ceiling of a rank if all ranks work, in GB/s. `launch`: the number of this launch."""
    case, state, interval = work.case, work.state, work.state.interval
    wire_bits = work.backend.wire_bits if case.ranks > 1 else None
    ceiling = ceilings.of_case(case, ceiling_gbps) if ceiling_gbps else None
    algbw, busbw, share = derived.bandwidths(case, interval.median, ceiling, wire_bits)
    return Result(
        case=case,
        backend=work.backend.name,
        algorithm=work.algorithm,
        sms=work.sms,
        staged=work.staged,
        memory=work.backend.memory,
        samples_us=[round(sample, 4) for sample in state.samples_us],
        median_us=interval.median,
        ci_low_us=interval.low,
        ci_high_us=interval.high,
        skew_us=float(np.median(state.skews_us)) if state.skews_us else None,
        calls_per_sample=state.calls,
        verification=verification,
        algbw_gbps=algbw,
        busbw_gbps=busbw,
        ceiling_gbps=ceiling if share is not None else None,
        sol=share,
        converged=state.converged,
        workload=work.workload,
        wire_bits=wire_bits,
        visits=state.visits,
        launches=[launch] * len(state.visits),
    )
