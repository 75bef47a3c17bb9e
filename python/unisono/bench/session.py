"""Runs one rank's part of a run, from the bootstrap to the last record, in step with all other ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from unisono import bootstrap, launch
from unisono.bench import beside, cases, limit, pairs, provenance, scaling, workloads
from unisono.bench.align import Aligner
from unisono.bench.backends.base import OTHER, Backend, Ranks, load
from unisono.bench.backends.mpi import set_thread_level
from unisono.bench.binding import Binding
from unisono.bench.buffers import Pools, needed_bytes
from unisono.bench.cells import Work, make_groups
from unisono.bench.control import Control, Interrupt
from unisono.bench.device import Device, HangError, HostDevice, one_clock
from unisono.bench.fabric import FabricDevice
from unisono.bench.measure import Measurement
from unisono.bench.options import Options
from unisono.bench.progress import Display
from unisono.records import (
    SCHEMA_VERSION,
    Case,
    End,
    Failure,
    Record,
    RecordsWriter,
    Result,
    Run,
    Skip,
    Workload,
)
from unisono.records.vocabulary import case_text

# The deadline of one exchange of the bench. The slowest call of another rank may take as long.
EXCHANGE_TIMEOUT_S = 300.0
ALIGN_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of the run, on every rank. Only rank 0 has `results`."""

    failures: int
    interrupted: bool
    results: list[Result]


def run(options: Options, binding: Binding | None = None) -> Outcome:
    """Joins the other ranks by the environment, and runs. `binding`: this rank's cores; None: as the launcher
    has bound it.

    Raises UsageError if the ranks are separate copies, HangError if a GPU does not come back."""
    import unisono

    set_thread_level()
    world = launch.from_env(os.environ)
    with contextlib.ExitStack() as stack:
        joined = bootstrap.make(world, timeout_s=EXCHANGE_TIMEOUT_S)
        stack.callback(joined.close)
        control = Control(joined)
        chosen = control.from_root(lambda: options, Options)

        def joining(library: Any = unisono, **how: Any) -> Any:
            meeting = bootstrap.make(world)
            stack.callback(meeting.close)
            communicator = library.init(bootstrap=meeting, lane="host", **how)
            stack.callback(communicator.close)
            return communicator

        aligning = joining(timeout_s=ALIGN_TIMEOUT_S)
        align = Aligner(control, aligning.barrier, partial(meeting, aligning))
        binding = binding or Binding()
        if chosen.device == "cuda":
            binding.bind(own_threads=False)  # before libraries start threads, which inherit these cores
        device, where = _device(chosen, world.local_rank, control, align)
        if any(name.startswith(OTHER) for name in chosen.backends):
            # A copy, as the other one is. The barrier before a sample would warm the code of this library.
            with beside.loaded(*beside.own(), mark="own") as copy:
                measured = joining(copy, **where)
        else:
            measured = joining(**where)
        interrupt = stack.enter_context(Interrupt().watched())
        session = Session(chosen, control, measured, interrupt, world.launcher, device, binding)
        stack.callback(session.close)
        try:
            return session.run()
        except HangError:
            stack.pop_all()  # closing would wait for the GPU
            raise


def meeting(communicator: Any, peer: int) -> Callable[[], object]:
    """Returns a barrier of this rank and `peer`."""
    mine, theirs = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    return partial(communicator.send_recv, mine, peer, theirs, peer)


def _device(
    options: Options, local_rank: int, control: Control, align: Aligner
) -> tuple[Device, dict[str, Any]]:
    """Returns this rank's device, and the arguments of unisono.init for it."""
    if options.device != "cuda":
        kind = FabricDevice if options.fabric else HostDevice
        return kind(align, align.with_peer, control.rank, one_clock(control)), {}
    from unisono.bench.cuda.device import LIBRARY_S, CudaDevice

    return CudaDevice(local_rank, control, align), {"device": local_rank, "timeout_s": LIBRARY_S}


class Session:
    """A run on one rank. Rank 0 writes the records and shows the progress."""

    def __init__(
        self,
        options: Options,
        control: Control,
        communicator: Any,
        interrupt: Interrupt,
        launcher: str,
        device: Device,
        binding: Binding | None = None,
    ) -> None:
        self.options, self.control, self.launcher = options, control, launcher
        self.device, self._binding = device, binding or Binding()
        self._communicator, self._interrupt = communicator, interrupt
        self._writer: RecordsWriter | None = None
        self._backends: list[Backend] = []
        self._works: list[Work] = []
        self._barriers_us: list[float] = []  # at the start and the end
        self._display = Display(options.terminal_columns)
        self._began = time.monotonic()
        if control.rank == 0:
            several = options.launches > 1 or bool(options.mpis)
            self._writer = RecordsWriter(Path(options.directory), more=several)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()  # first, since freeing memory of a broken GPU may not return
        for work in self._works:
            work.close()
        for backend in self._backends:
            self.device.beat(f"the end of {backend.name}")
            backend.close()
        self.device.close()

    def emit(self, record: Record) -> None:
        """Writes a record on rank 0. Prints failures at once."""
        if self._writer is None:
            return
        self._writer.write(record)
        if isinstance(record, Failure):
            where = f"rank {record.rank}: " if record.rank is not None else ""
            self._display.say(f"FAILED {case_text(record.case)} on {record.backend}: {where}{record.message}")

    def run(self) -> Outcome:
        """Runs from the first record to the last."""
        options, control = self.options, self.control
        started = provenance.now()
        self.device.watch.start()
        self._backends, unusable = self._open_backends()
        self._emit_run(started, self._cores())
        for skip in unusable:
            self.emit(skip)
        if options.to_memory_limit:
            return self._to_memory_limit()
        models = workloads.select(options.workloads, control.size, options.device)
        for workload, _ in models:
            self.emit(workload)
        pools, wanted = self._allocate(self._wanted(models))
        groups, unsupported = make_groups(wanted, self._backends)
        for name, case, reason in unsupported:
            self.emit(Skip(backend=name, reason=reason, case=case))
        self._works = [work for group in groups for work in group.works]
        ceiling = self._ceilings()
        measurement = Measurement(
            control,
            pools,
            groups,
            options.limits,
            options.seed,
            self._binding,
            self._interrupt,
            self.emit,
            self._display.show,
            verified=options.check,
            ceiling_gbps=ceiling,
            device=self.device,
            launch=options.launch,
        )
        with self._display if control.rank == 0 else contextlib.nullcontext():
            results = measurement.run()
        if not measurement.interrupted:
            self._ceilings()
        self._emit_end(measurement.interrupted)
        failures = control.from_root(lambda: measurement.failures, int)
        return Outcome(failures, measurement.interrupted, results)

    def _to_memory_limit(self) -> Outcome:
        sweep = limit.Sweep(
            self.control, self.device, self._communicator, self._interrupt, self.emit, self._say
        )
        sweep.run(self.options, self._backends)
        self._emit_end(sweep.interrupted)
        return Outcome(sweep.failures, sweep.interrupted, [])

    def _emit_end(self, interrupted: bool) -> None:
        if self.control.rank == 0:
            elapsed = time.monotonic() - self._began
            state = self.device.state()
            self.emit(
                End(
                    finished_at=provenance.now(),
                    elapsed_s=elapsed,
                    interrupted=interrupted,
                    launch=self.options.launch,
                    barrier_us=[round(us, 4) for us in self._barriers_us],
                    gpu_state=state,
                )
            )

    def _wanted(self, models: Sequence[tuple[Workload, list[Case]]]) -> list[tuple[Case, str | None]]:
        options = self.options
        grid = scaling.grid(options, self.control.size) or options.grid(self.control.size)
        chosen = pairs.select(options.pairs, self.control.size)
        wanted: list[tuple[Case, str | None]] = [
            (one, None)
            for case in grid
            for one in cases.point_to_point(case, options.patterns, chosen, options.streams)
        ]
        if few := cases.too_few(options.sizes, options.dtypes):
            self._say(few)
        wanted += [(case, workload.name) for workload, needed in models for case in needed]
        threads = bool(options.threads)
        return [(msgspec.structs.replace(case, one_process=threads), name) for case, name in wanted]

    def _open_backends(self) -> tuple[list[Backend], list[Skip]]:
        """Returns the backends that every rank can use, and a Skip for each other one."""
        usable: list[Backend] = []
        skips: list[Skip] = []
        control, device = self.control, self.device
        ranks = Ranks(
            control.rank, control.size, control.gather_bytes, self._communicator, device.index, device.stream
        )
        for name in self.options.backends:
            backend = load(name)
            device.beat(f"the start of {name}")
            wrong_place = None
            if device.kind not in backend.devices:
                wrong_place = f"it works on {' and '.join(backend.devices)} only."
            elif self.options.threads and not backend.threads:
                wrong_place = "its ranks cannot be threads of one process."
            failed = control.step(partial(_available, backend, ranks.size, wrong_place))
            if failed is None:
                failed = control.step(partial(backend.setup, ranks))
                if failed is not None:
                    _undo_setup(backend)
            if failed is None:
                usable.append(backend)
            else:
                skips.append(Skip(backend=name, reason=failed[1]))
                self._say(f"{name} is left out: {failed[1]}")
        if not usable:
            self._say("No backend is usable, so nothing is measured.")
        return usable, skips

    def _say(self, text: str) -> None:
        if self.control.rank == 0:
            self._display.say(text)

    def _cores(self) -> int:
        """Returns how many cores of rank 0's machine the ranks there may use together. A launcher may have
        bound each rank to a few of them."""
        allowed = self.control.gather(sorted(self._binding.allowed), list[int])
        nodes = nodes_of(self._communicator) or [0] * self.control.size
        here = [cores for cores, node in zip(allowed, nodes, strict=True) if node == nodes[0]]
        return max(self.options.cores, len(set().union(*here)))

    def _emit_run(self, started: str, cores: int) -> None:
        if self.control.rank != 0:
            return
        options = self.options
        self.emit(
            Run(
                schema=SCHEMA_VERSION,
                run_id=os.urandom(8).hex(),
                started_at=started,
                command=options.command,
                preset=options.preset,
                seed=options.seed,
                ranks=self.control.size,
                launcher=self.launcher,
                machine=provenance.machine(cores, self.device.gpus(), self.device.state()),
                libraries=provenance.libraries(
                    {backend.name: backend.version() for backend in self._backends}
                ),
                environment=provenance.environment(os.environ),
                commit=provenance.commit(),
                nodes=nodes_of(self._communicator),
                launch=options.launch,
                launches=options.launches,
            )
        )

    def _allocate(self, wanted: list[tuple[Case, str | None]]) -> tuple[Pools, list[tuple[Case, str | None]]]:
        """Returns the pools, and the cases that fit into memory. Records and prints which do not."""
        control = self.control
        for backend in self._backends:
            backend.expect([case for case, _ in wanted])
        self.device.beat("the buffers")
        owners = [backend for backend in self._backends if backend.own_memory]
        most = self.device.room(control, len(owners))
        room = self.options.room_bytes
        fits = {case: max(room, cases.memory_bytes(case)) <= most for case, _ in wanted}
        kept = [one for one in wanted if fits[one[0]]]
        reason = f"its buffers do not fit: {control.size} ranks have room for {most >> 20} MiB each."
        for case, _ in (one for one in wanted if not fits[one[0]]):
            self.emit(Skip(backend="all", reason=reason, case=case))
        if len(kept) < len(wanted):
            left_out = f"The largest cases are left out, {len(wanted) - len(kept)} of {len(wanted)}"
            self._say(f"{left_out}: {control.size} ranks have room for buffers of {most >> 20} MiB each.")
        listed = [case for case, _ in kept]
        # The buffers have `room_bytes`, even if no case of this run is as large.
        listed += [msgspec.structs.replace(case, bytes=room) for case in listed if case.bytes < room]
        pools = self.device.pools(listed, control.rank)
        symmetric = needed_bytes(listed, "symmetric")
        for backend in owners:
            failed = control.step(partial(pools.add_own, symmetric, backend))
            if failed is not None:
                self._say(f"{backend.name} is left out: {failed[1]}")
                self.emit(Skip(backend=backend.name, reason=failed[1]))
                self._backends.remove(backend)
                backend.close()
        failed = control.step(partial(pools.add_symmetric, symmetric, self._communicator))
        if failed is None:
            return pools, kept
        self._say(f"symmetric memory is left out: {failed[1]}")
        for case in (case for case in listed if case.memory == "symmetric"):
            self.emit(Skip(backend="all", reason=failed[1], case=case))
        return pools, [one for one in kept if one[0].memory == "plain"]

    def _ceilings(self) -> float | None:
        self.device.beat("the ceilings")
        if nodes_of(self._communicator):
            return None  # the memory's bandwidth does not limit messages between nodes
        self._binding.bind(own_threads=False)
        barrier_us = self.device.barrier_us()
        self._barriers_us += [] if barrier_us is None else [barrier_us]
        per_rank_gbps, found = self.device.ceilings(self.control)
        for record in found:
            self.emit(record)
        return per_rank_gbps


def nodes_of(communicator: Any) -> list[int]:
    """Returns the node of each rank; empty if all are on one."""
    if len(communicator.nodes) == 1:
        return []
    node_of = {rank: node for node, ranks in enumerate(communicator.nodes) for rank in ranks}
    return [node_of[rank] for rank in range(communicator.size)]


def _available(backend: Backend, ranks: int, wrong_place: str | None) -> str | None:
    return wrong_place or backend.available(ranks)


def _undo_setup(backend: Backend) -> None:
    """Undoes a setup that failed on any rank, without waiting for a rank that has not come so far."""
    with contextlib.suppress(Exception):  # the reason of the failure is known already
        backend.abort()
        backend.close()
