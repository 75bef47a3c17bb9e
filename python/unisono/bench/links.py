"""`unisono links`: measures the links between the GPUs of this machine, and writes the records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from unisono.bench import provenance
from unisono.bench.cases import CaseError
from unisono.bench.cuda.device import count, gpu_state, missing, prepare_environment
from unisono.bench.cuda.links import Links, ceiling_of, everything
from unisono.bench.cuda.runtime import CudaError
from unisono.bench.device import HangError
from unisono.errors import UnisonoError
from unisono.records import SCHEMA_VERSION, End, Link, RecordsWriter, Run


def gpus() -> int:
    """Returns how many GPUs there are to measure. Raises CaseError unless torch, built for CUDA, sees two."""
    why = missing()
    if why is None and count() < 2:
        why = "`unisono links` measures what lies between GPUs: two of them are needed."
    if why is not None:
        raise CaseError(why)
    return count()


def run(
    devices: int, directory: Path, command: Sequence[str], show: Callable[[str], None]
) -> tuple[list[Link], Exception | None]:
    """Measures all links and writes each record at once. `show` gets a phrase for each measurement.

    Returns the links, and the error that ended the run, if any. The links measured before it are kept."""
    prepare_environment(os.environ)
    began, failed = time.monotonic(), None
    found: list[Link] = []
    writer = RecordsWriter(directory)
    writer.write(_head(devices, command))
    try:
        for link in _measured(devices, show):
            writer.write(link)
            found.append(link)
    except (HangError, CudaError, UnisonoError) as error:
        failed = error
    ceiling = ceiling_of(found)
    if ceiling is not None:
        writer.write(ceiling)
    if failed is None:
        elapsed = time.monotonic() - began
        writer.write(
            End(finished_at=provenance.now(), elapsed_s=elapsed, interrupted=False, gpu_state=gpu_state())
        )
    writer.close()
    return found, failed


def _measured(devices: int, show: Callable[[str], None]) -> Iterator[Link]:
    bench = Links(range(devices))
    yield from everything(bench, show)
    bench.close()


def _head(devices: int, command: Sequence[str]) -> Run:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(devices)]
    return Run(
        schema=SCHEMA_VERSION,
        run_id=os.urandom(8).hex(),
        started_at=provenance.now(),
        command=provenance.command(command),
        preset=None,
        seed=0,
        ranks=devices,
        launcher="none",
        machine=provenance.machine(gpus=names, gpu_state=gpu_state()),
        libraries=provenance.libraries({}),
        environment=provenance.environment(os.environ),
        commit=provenance.commit(),
    )
