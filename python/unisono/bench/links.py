"""`unisono links`: what the links between the GPUs of this machine carry, as records, tables and a report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unisono.bench import provenance
from unisono.bench.cases import CaseError
from unisono.bench.cuda.device import count, gpu_state, missing, prepare_environment
from unisono.bench.cuda.links import Links, ceiling_of, everything
from unisono.bench.cuda.runtime import CudaError
from unisono.bench.device import HangError
from unisono.bench.finish import FAILED, OK, show_report
from unisono.bench.records import SCHEMA_VERSION, End, Link, RecordsWriter, Run
from unisono.errors import UnisonoError


def gpus() -> int:
    """How many GPUs there are to measure. Raises CaseError where there are not two that a torch for CUDA
    sees."""
    why = missing()
    if why is None and count() < 2:
        why = "`unisono links` measures what lies between GPUs: two of them are needed."
    if why is not None:
        raise CaseError(why)
    return count()


def run(devices: int, directory: Path, command: Sequence[str], console: Console, with_report: bool) -> int:
    """Measures all of it, writes the records as they come, prints the tables; returns the exit code. A link
    that hangs or fails ends it in words: what was measured before is kept."""
    prepare_environment(os.environ)
    began, failed = time.monotonic(), None
    found: list[Link] = []
    writer = RecordsWriter(directory)
    writer.write(_head(devices, command))
    try:
        with console.status("links") as status:
            for link in _measured(devices, lambda doing: status.update(f"links: {doing}")):
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
    for table in tables(found):
        console.print(table)
    if failed is not None:
        console.print(f"unisono links: {failed}", style="red")
    written = show_report(directory, console) if with_report else True
    if isinstance(failed, HangError):
        console.file.flush()
        os._exit(FAILED)  # the driver would wait for the hung GPU
    return OK if failed is None and written else FAILED


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


def tables(found: Sequence[Link]) -> list[Table]:
    """A summary by engine and pattern, and a matrix of pairs for each engine."""
    from unisono.report import links, model

    shown_model = model.Model(hardware=[None], links=[(0, link) for link in found])
    summary = links.summary(shown_model)
    first = Table(*summary.head, title="Links between the GPUs")
    for row in summary.rows:
        first.add_row(*row)
    made = [first]
    for matrix in links.matrices(shown_model):
        table = Table("from \\ to", *matrix.names, title=matrix.title)
        for name, cells in zip(matrix.names, matrix.cells, strict=True):
            table.add_row(name, *(value for value, _ in cells))
        made.append(table)
    return made
