"""`unisono info`: shows the machine as a run would see it, and which backends can run here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unisono.bench import fabric, mpis, provenance
from unisono.bench.backends import base
from unisono.bench.cases import CaseError
from unisono.records import text
from unisono.tables import Tables


def cores_text() -> str:
    """Returns in words how many cores this process may use, of how many, their sockets and threads a core."""
    usable = sorted(os.sched_getaffinity(0))
    places, physical = set(), set()
    for core in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        try:
            package = (topology / "physical_package_id").read_text().strip()
            physical.add((package, (topology / "core_id").read_text().strip()))
            places.add(package)
        except OSError:
            continue
    threads = f", {len(usable) / len(physical):.3g} hardware thread(s) a core" if physical else ""
    return f"{len(usable)} usable of {os.cpu_count()}, {max(1, len(places))} socket(s){threads}"


def backend_rows() -> list[tuple[str, bool, str]]:
    """Returns (name, usable, version or reason) of every known backend."""
    if find_spec("mpi4py") and "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc.initialize = False  # this process is no rank
    rows = []
    for name in base.names():
        if name in mpis.NAMES:  # a process has one MPI, which row `mpi` shows
            mpi = mpis.find(name)
            what = f"{mpis.NAMES[name]} {mpi.version}, by --mpi {name}" if mpi else mpis.remedy(name)
            rows.append((name, mpi is not None, what))
            continue
        try:
            backend = base.load(name)
            reason = backend.available(1)
            rows.append((name, reason is None, reason or backend.version()))
        except Exception as error:  # a broken installation, which this command must report
            rows.append((name, False, f"{type(error).__name__}: {error}"))
    return rows


def fabric_text() -> str:
    """Returns libfabric's version and providers without MPI, or why the fabric lane cannot be used."""
    try:
        return fabric.ask("from unisono.bench import info; print(info.fabric_here())")
    except CaseError as error:
        return f"not usable: {error}"


def fabric_here() -> str:
    """Returns version and providers of this process's libfabric. Raises UnisonoError."""
    import unisono

    described = [
        one.name
        + (f" ({one.nics} NICs)" if one.nics > 1 else "")
        + (f" ({one.line_gbps:g} Gbit/s)" if one.line_gbps is not None else "")
        for one in unisono.fabric_providers()
    ]
    return f"libfabric {unisono.fabric_version()}: {', '.join(described) or 'no provider with remote writes'}"


def cuda_text() -> str:
    """Returns in words how many GPUs the CUDA lane sees."""
    import unisono

    count = unisono.device_count()
    return f"{count} GPU(s)" if count else "no GPU is seen, or nvcc (12.8 or newer) was not when it was built"


def copies_text() -> str:
    """Returns in words how fast the kernel copies between processes here, as two ranks find it."""
    program = "import unisono; c = unisono.init(); c.rank or print(c.kernel_copies); c.close()"
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}"
    found = done.stdout.strip()
    return "not allowed" if found == "none" else f"{found}, beside two copies through shared memory"


def show(console: Console) -> None:
    """Prints machine, libraries and backends."""
    machine = provenance.machine()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("processor", machine.cpu)
    table.add_row("cores", cores_text())
    table.add_row("caches", ", ".join(f"{name} {text.size(size)}" for name, size in machine.caches.items()))
    table.add_row("NUMA nodes", str(machine.numa_nodes))
    free = text.size(provenance.free_bytes())
    table.add_row("memory", f"{text.size(machine.memory_bytes)}, {free} available")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm")
        table.add_row("shared memory", f"{text.size(shared.total)}, {text.size(shared.free)} free")
    table.add_row("kernel", machine.kernel)
    table.add_row(
        "mpiexec",
        "found" if mpis.find_mpiexec() else "not found: the mpi backend needs one (pip install mpich)",
    )
    rows = backend_rows()
    table.add_row("kernel's copies", copies_text())
    table.add_row("fabric lane", fabric_text())
    table.add_row("CUDA lane", cuda_text())
    table.add_row("plan", Tables.find().in_words())
    for name, version in provenance.libraries({}).items():
        table.add_row(name, version)
    console.print(table)
    backends = Table("backend", "usable", "version, or why not")
    for name, usable, detail in rows:
        backends.add_row(name, "yes" if usable else "no", detail)
    console.print(backends)
