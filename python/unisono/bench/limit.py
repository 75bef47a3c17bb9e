"""`unisono bench --to-memory-limit`: finds the largest size of each collective on each backend, within 2 %.

The size doubles until its buffers and the library's own memory no longer fit into the GPUs' memory. Then the
interval between the largest size that ran and the smallest that did not is halved.

Every size is checked on random data and timed by a few calls. All of its memory is given back before the
next; a line says what a library kept.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from unisono.bench import cells
from unisono.bench.backends.base import Backend
from unisono.bench.buffers import needed_bytes
from unisono.bench.cases import lacking_ops, make_case
from unisono.bench.control import Control, Interrupt
from unisono.bench.device import Device
from unisono.bench.options import Options
from unisono.errors import UnisonoError
from unisono.records import Case, Failure, Largest, Record, Skip, text
from unisono.records.vocabulary import KNOWN, PLACEMENTS, case_text

FULL = ("out of memory", "outofmemory", "cannot allocate", "no space left", "memory allocation")
SAMPLES = 5
WITHIN = 0.02  # of the largest size that ran: the next larger one did not
LEAK_BYTES = 64 << 20  # a library may keep so much for later calls


class Memory(msgspec.Struct):
    """The memory of one GPU, in bytes."""

    used: int
    total: int


@dataclass(frozen=True)
class Step:
    """The outcome of one size: time and memory, or an error (`full`: memory ran out)."""

    time_us: float = 0.0
    memory: Memory | None = None
    error: tuple[int, str] | None = None
    full: bool = False


def is_full(message: str) -> bool:
    """Returns whether an error says that memory ran out."""
    return any(words in message.lower() for words in FULL)


def _following(ran: Case, full: Case | None) -> Case | None:
    """Returns the case to try next. `ran` is the largest that ran, `full` the smallest that did not fit.

    None: there is no size between them, or `full` is within WITHIN of `ran`."""
    if full is None:
        return msgspec.structs.replace(ran, bytes=2 * ran.bytes)
    if full.bytes - ran.bytes <= WITHIN * ran.bytes:
        return None
    middle = make_case(ran.collective, (ran.bytes + full.bytes) // 2, ran.dtype, ran.ranks, ran.op)
    return None if middle.bytes == ran.bytes else msgspec.structs.replace(ran, bytes=middle.bytes)


class Sweep:
    """Runs the search. All ranks call `run` in step; rank 0 writes the records and prints the outcome."""

    def __init__(
        self,
        control: Control,
        device: Device,
        communicator: Any,
        interrupt: Interrupt,
        emit: Callable[[Record], None],
        say: Callable[[str], None],
    ) -> None:
        self._control, self._device, self._communicator = control, device, communicator
        self._interrupt, self._emit, self._say = interrupt, emit, say
        self.failures = 0
        self.interrupted = False

    def run(self, options: Options, backends: Sequence[Backend]) -> None:
        """Searches for every backend, collective, dtype, op and memory of the options, from their smallest
        size on."""
        sized = [name for name in options.collectives if name != "barrier"]
        lacking = lacking_ops(options.dtypes, options.ops, self._device.kind)
        for backend, name, dtype, op, memory in itertools.product(
            backends, sized, options.dtypes, options.ops, options.memories
        ):
            reduces = KNOWN[name].reduces
            if self._stopped() or (op != options.ops[0] and not reduces):
                continue
            if reduces and (dtype, op) in lacking:
                continue
            on_gpu = self._device.kind == "cuda"
            mode = "events" if on_gpu and backend.queues() else "latency"
            kind = self._device.kind
            case = make_case(
                name, min(options.sizes), dtype, self._control.size, op, memory=memory, mode=mode, device=kind
            )
            case = msgspec.structs.replace(case, one_process=bool(options.threads))
            self._grow(backend, case, options.seed)

    def _stopped(self) -> bool:
        self.interrupted |= any(self._control.gather(self._interrupt.asked, bool))
        return self.interrupted

    def _grow(self, backend: Backend, case: Case, seed: int) -> None:
        """Doubles the size until the memory is full, then bisects."""
        before = self._fullest()
        largest: tuple[Case, Step] | None = None
        if backend.own_memory and case.memory == "symmetric":
            reason = "its own memory is given back with its communicator only, so that it cannot grow."
            self._emit(Skip(backend=backend.name, reason=reason, case=case))
            return
        full: tuple[Case, str] | None = None  # the smallest size for which memory ran out, and the reason
        stopped: str | None = None
        try:
            while not self._stopped():
                stopped = backend.supports(case)
                if stopped is not None:
                    break
                step = self._step(backend, case, seed)
                self._give_back()
                if step.error is None:
                    largest = case, step
                elif step.full and largest is not None:
                    full = case, self._why(backend, case, step)
                else:
                    stopped = self._why(backend, case, step)
                    break
                following = _following(largest[0], full and full[0])
                if following is None:
                    stopped = full and full[1]
                    break
                case = following
        finally:
            unmeasured = f"the run ended before {text.size(case.bytes)} had run."
            self._record(backend, case, largest, stopped or unmeasured)
        leaked = self._fullest().used - before.used
        if leaked > LEAK_BYTES:
            self._say(f"{backend.name} {case.collective}: {leaked >> 20} MiB were not given back.")

    def _why(self, backend: Backend, case: Case, step: Step) -> str:
        """Returns why a size did not run. Records a failure unless memory ran out."""
        rank, message = step.error or (0, "")
        first_line = message.split("\n")[0]
        if not step.full:
            self.failures += 1
            self._emit(Failure(backend=backend.name, case=case, rank=rank, message=message))
        return f"{text.size(case.bytes)} did not run on rank {rank}: {first_line}"

    def _record(self, backend: Backend, case: Case, largest: tuple[Case, Step] | None, stopped: str) -> None:
        """Records the largest size that ran, and why `case`, the next, did not."""
        if largest is None:
            self._emit(Skip(backend=backend.name, reason=stopped, case=case))
            return
        ran, good = largest
        memory = good.memory or Memory(0, 0)
        self._emit(
            Largest(
                case=ran,
                backend=backend.name,
                time_us=good.time_us,
                used_bytes=memory.used,
                total_bytes=memory.total,
                stopped=stopped,
            )
        )
        self._say(
            f"{backend.name} {case_text(ran)}: {good.time_us:.0f} us, "
            f"{memory.used >> 20} of {memory.total >> 20} MiB used; {stopped}"
        )

    def _step(self, backend: Backend, case: Case, seed: int) -> Step:
        """Allocates, checks and times one size. Drops all of its memory on return."""
        control, device = self._control, self._device
        device.beat(f"{case_text(case)} on {backend.name}")
        pools: Any = None
        error: str | None = None
        try:
            pools = device.pools([case], control.rank)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        failed = control.first_error(error)
        if failed is None and case.memory == "symmetric":
            try:
                pools.add_symmetric(needed_bytes([case], "symmetric"), self._communicator)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            failed = control.first_error(error)
        if failed is not None:
            return Step(error=failed, full=is_full(failed[1]))
        group = cells.Group(0, backend, [msgspec.structs.replace(case, placement=PLACEMENTS[0])])
        wrong = cells.check(control, pools, group, seed, device, first=True)
        if wrong:
            return Step(error=(wrong[0].rank, wrong[0].message), full=is_full(wrong[0].message))
        call = backend.prepare(case, pools.place(case, backend).buffers)
        runner = device.runner(case, call, backend)
        timed = runner.timed(SAMPLES, 1, 1)
        runner.close()
        failed = control.first_error(timed.error)
        if failed is not None:
            return Step(error=failed, full=is_full(failed[1]))
        slowest = [
            max(sample) for sample in zip(*control.gather(timed.durations.tolist(), list[int]), strict=True)
        ]
        return Step(statistics.median(slowest) / 1e3, self._fullest())

    def _fullest(self) -> Memory:
        """Returns the memory of the fullest GPU of all ranks, counting all processes."""
        used, total = self._device.used_bytes()
        return max(self._control.gather(Memory(used, total), Memory), key=lambda memory: memory.used)

    def _give_back(self) -> None:
        gc.collect()
        self._device.give_back()
        with suppress(UnisonoError):  # the next step reports a failed communicator
            self._communicator.empty(1)  # frees dropped symmetric memory of GPUs
        self._control.gather(True, bool)  # no rank allocates before all have given back
