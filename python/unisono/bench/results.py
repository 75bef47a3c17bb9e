"""From a finished cell to its record."""

from __future__ import annotations

import numpy as np

from unisono.bench import ceilings
from unisono.bench.cells import Work
from unisono.records import Result, Verification
from unisono.records.vocabulary import DTYPES, WIRES, bus_factor


def result_of(work: Work, verification: Verification, ceiling_gbps: float | None) -> Result:
    """The record of a cell with at least one sample; `ceiling_gbps` is a rank's where all of them work.
    Bandwidths are of the median; GB/s are bytes per ns."""
    case, state, interval = work.case, work.state, work.state.interval
    median_us = interval.median
    algbw = case.bytes / (median_us * 1e3) if median_us > 0 else 0.0
    busbw = algbw * bus_factor(case.collective, case.ranks)
    wire_bits = WIRES[work.backend.wire] if work.backend.wire is not None and case.ranks > 1 else None
    travels = busbw * wire_bits / (8 * DTYPES[case.dtype].itemsize) if wire_bits else busbw
    ceiling = ceilings.of_case(case, ceiling_gbps) if ceiling_gbps else None
    share = travels / ceiling if ceiling and busbw > 0 else None
    return Result(
        case=case,
        backend=work.backend.name,
        algorithm=work.algorithm,
        sms=work.sms,
        staged=work.staged,
        memory=work.backend.memory,
        samples_us=[round(sample, 4) for sample in state.samples_us],
        median_us=median_us,
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
    )
