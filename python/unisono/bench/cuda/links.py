"""Measures the links between the GPUs of this machine, in one process that drives all GPUs.

Engines: the copy engines (cudaMemcpyAsync between peers), loads and stores of SMs, bulk copies of SMs (from
Hopper on). A flag to another GPU and back is measured too. Patterns: one pair, one way; a ring, every GPU to
the next; all pairs at once, every GPU to every other, in the order me+1, me+2, ... All GPUs of a sample start
by one word of host memory. A sample is the time of the slowest GPU by its own events. `gbps` counts the bytes
that leave each sending GPU, the median over samples.
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations
from time import monotonic
from typing import Any

import msgspec

from unisono.bench.cuda.runtime import MEMCPY_DEFAULT, CudaError, Runtime
from unisono.bench.cuda.start import PAGE_WORDS, Gate, kernels
from unisono.bench.device import HangError
from unisono.errors import UnisonoError
from unisono.records import Ceiling, Link

COPY_ENGINE, SM_LOAD, SM_STORE, BULK_STORE = "copy_engine", "sm_load", "sm_store", "bulk_store"
BYTES = 256 << 20  # of one transfer; larger than every cache
UNIT = 16384  # transfers are a multiple of so many bytes
SAMPLES, WAIT_S = 7, 30.0
BULK_CAPABILITY = (9, 0)  # of the first GPUs with bulk copies
BLOCKS = (8, 16, 32, 64, 128)  # of a GPU, in all_pairs divided among its peers; the fastest number counts
ROUNDS = 1000
ELSEWHERE_S = 90.0

Transfer = tuple[int, int, int]  # source, target, bytes
Show = Callable[[str], None]


class Links:
    """The GPUs `devices`, each with a stream for every peer, and memory to send from and to."""

    def __init__(self, devices: Sequence[int]) -> None:
        import torch

        self._torch, self.devices, self.size = torch, list(devices), BYTES
        self._runtime = Runtime(torch.version.cuda)
        self._kernels = kernels()
        self._epoch = 0
        self._streams: dict[tuple[int, int], Any] = {}
        self._memory: dict[int, tuple[Any, Any]] = {}
        for device in self.devices:
            with torch.cuda.device(device):
                for peer in self.devices:
                    if peer != device:
                        self._runtime("cudaDeviceEnablePeerAccess", peer, 0)
                        self._streams[device, peer] = torch.cuda.Stream(device)
                made = [torch.zeros(self.size, dtype=torch.uint8, device=f"cuda:{device}") for _ in range(2)]
                torch.cuda.current_stream(device).synchronize()
                self._memory[device] = (made[0], made[1])
        self._page = mmap.mmap(-1, PAGE_WORDS * 8)
        self._gate = Gate(memoryview(self._page), self._runtime, WAIT_S)

    @property
    def engines(self) -> tuple[str, ...]:
        """Returns the engines of this build on all these GPUs; without CUDA only the copy engines."""
        if self._kernels is None:
            return (COPY_ENGINE,)
        oldest = min(self._torch.cuda.get_device_capability(device) for device in self.devices)
        return (COPY_ENGINE, SM_LOAD, SM_STORE, *((BULK_STORE,) if oldest >= BULK_CAPABILITY else ()))

    def close(self) -> None:
        self._gate.close()
        self._memory.clear()
        self._torch.cuda.empty_cache()

    def transfers(self, pattern: str, pair: tuple[int, int] | None = None) -> list[Transfer]:
        """Returns the transfers of a pattern."""
        ring, n = self.devices, len(self.devices)
        if pair is not None:
            return [(*pair, self.size)]
        if pattern == "ring":
            return [(device, ring[(at + 1) % n], self.size) for at, device in enumerate(ring)]
        share = self.size // (n - 1) // UNIT * UNIT
        return [(ring[at], ring[(at + step) % n], share) for step in range(1, n) for at in range(n)]

    def measure(
        self, engine: str, pattern: str, pair: tuple[int, int] | None = None, blocks: int | None = None
    ) -> Link:
        """Measures one engine in one pattern. `pair`: for the pattern of that name. `blocks`: of a kernel;
        None: the fastest number."""
        moves = self.transfers(pattern, pair)
        leaving = sum(move[2] for move in moves if move[0] == moves[0][0])
        self._sample(engine, moves, blocks or BLOCKS[-1])
        if engine != COPY_ENGINE and blocks is None:
            blocks = min(BLOCKS, key=lambda n: min(self._sample(engine, moves, n) for _ in range(2)))
        samples = [leaving / self._sample(engine, moves, blocks or 0) for _ in range(SAMPLES)]
        return Link(
            engine=engine,
            pattern=pattern,
            devices=len(self.devices),
            bytes=moves[0][2],
            source=pair[0] if pair else None,
            target=pair[1] if pair else None,
            blocks=blocks,
            gbps=statistics.median(samples),
            samples=samples,
        )

    def _sample(self, engine: str, moves: list[Transfer], blocks: int) -> float:
        """Takes a sample. Returns the time of the slowest GPU in ns."""
        torch = self._torch
        self._epoch += 1
        actors: dict[int, list[Transfer]] = {}
        for move in moves:
            actors.setdefault(move[1] if engine == SM_LOAD else move[0], []).append(move)
        timed: list[tuple[Any, Any, Any]] = []  # stream, first event, last event
        for device, mine in actors.items():
            with torch.cuda.device(device):
                # The copy engine makes transfers one by one; kernels run side by side.
                by_peer = engine != COPY_ENGINE and len(mine) > 1
                streams = [self._stream(device, move if by_peer else mine[0]) for move in mine]
                for stream in dict.fromkeys(streams):
                    self._gate.arm(int(stream.cuda_stream), self._epoch)
                    begin, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record(stream)
                    timed.append((stream, begin, last))
                for move, stream in zip(mine, streams, strict=True):
                    self._move(engine, move, stream, max(1, blocks // len(mine)))
                for stream, _, last in timed[-len(set(streams)) :]:
                    last.record(stream)
        self._gate.open(self._epoch)
        self._wait([last for _, _, last in timed])
        return 1e6 * max(float(begin.elapsed_time(last)) for _, begin, last in timed)

    def _stream(self, device: int, move: Transfer) -> Any:
        return self._streams[device, move[1] if device == move[0] else move[0]]

    def _move(self, engine: str, move: Transfer, stream: Any, blocks: int) -> None:
        source, target, size = move
        queue = int(stream.cuda_stream)
        begin, end = int(self._memory[source][0].data_ptr()), int(self._memory[target][1].data_ptr())
        match engine:
            case "copy_engine":
                self._runtime("cudaMemcpyAsync", end, begin, size, MEMCPY_DEFAULT, queue)
            case "sm_load":
                self._kernels.load(queue, begin, size, end, blocks)
            case "sm_store":
                self._kernels.store(queue, end, size, blocks)
            case _:
                self._kernels.bulk_copy(queue, end, begin, size, blocks)

    def round_trip(self, first: int, second: int) -> Link:
        """Measures a flag from one GPU to the other and back, with one thread on each."""
        torch, samples = self._torch, []
        for _ in range(SAMPLES):
            self._epoch += 1
            words = {d: torch.zeros(1, dtype=torch.int32, device=f"cuda:{d}") for d in (first, second)}
            took = torch.zeros(2, dtype=torch.int64).pin_memory()
            events = []
            for index, (mine, theirs) in enumerate(((first, second), (second, first))):
                torch.cuda.current_stream(mine).synchronize()
                with torch.cuda.device(mine):
                    stream = self._streams[mine, theirs]
                    queue = int(stream.cuda_stream)
                    self._gate.arm(queue, self._epoch)
                    flags = int(words[mine].data_ptr()), int(words[theirs].data_ptr())
                    elapsed = int(took[index:].data_ptr())
                    self._kernels.round_trips(queue, *flags, index == 0, ROUNDS, elapsed, WAIT_S / 10)
                    events.append(torch.cuda.Event())
                    events[-1].record(stream)
            self._gate.open(self._epoch)
            self._wait(events)
            if not took[0]:
                raise HangError(
                    f"a flag from GPU {first} did not come back from GPU {second}: peer access fails."
                )
            samples.append(float(took[0]) / ROUNDS / 1e3)
        return Link(
            engine="flag",
            pattern="round_trip",
            devices=len(self.devices),
            bytes=4,
            source=first,
            target=second,
            round_trip_us=statistics.median(samples),
            samples=samples,
        )

    def _wait(self, events: Iterable[Any]) -> None:
        deadline = monotonic() + WAIT_S
        for event in events:
            while not event.query():
                if monotonic() > deadline:
                    raise HangError(f"a transfer between GPUs was not done after {WAIT_S:.0f} s.")


def everything(links: Links, show: Show) -> Iterator[Link]:
    """Measures every engine in every pattern, and the round trips. `show` gets a phrase before each."""
    for engine in links.engines:
        blocks = None
        for pair in permutations(links.devices, 2):
            show(f"{engine}, GPU {pair[0]} to GPU {pair[1]}")
            link = links.measure(engine, "pair", pair, blocks)
            blocks = link.blocks  # as for the first pair, so that pairs differ only in their links
            yield link
        for pattern in ("ring", "all_pairs"):
            show(f"{engine}, {pattern}")
            yield links.measure(engine, pattern)
    if len(links.engines) > 1:
        for first, second in permutations(links.devices, 2):
            show(f"flag, GPU {first} and GPU {second}")
            yield links.round_trip(first, second)


def ceiling_of(found: Iterable[Link]) -> Ceiling | None:
    """Returns the ceiling of bus bandwidth: the ring by its fastest engine."""
    rings = [link for link in found if link.pattern == "ring" and link.gbps]
    if not rings:
        return None
    best = max(rings, key=lambda link: link.gbps or 0.0)
    return Ceiling(name="ring", bytes=best.bytes, gbps=best.gbps or 0.0, samples_gbps=best.samples)


def elsewhere(devices: int) -> list[Ceiling | Link]:
    """Returns the rings of the first `devices` GPUs by all engines, and the ceiling, from an own process.

    A rank that opened the other GPUs would hold memory there, and take turns with their own ranks. If the
    process fails, it prints why, and the rings measured before are returned."""
    command = [sys.executable, "-m", "unisono.bench.cuda.links", str(devices)]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, timeout=ELSEWHERE_S, check=False).stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    decoder = msgspec.json.Decoder(Link)
    found = [decoder.decode(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
    best = ceiling_of(found)
    return [*found, *([best] if best else [])]


def main(devices: int) -> None:
    """Writes the ring of each engine to stdout, a line each. Takes about a second."""
    links = Links(range(devices))
    for engine in links.engines:
        sys.stdout.write(msgspec.json.encode(links.measure(engine, "ring")).decode() + "\n")
        sys.stdout.flush()
    links.close()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except (HangError, CudaError, UnisonoError) as error:
        sys.stderr.write(f"unisono bench: the links between the GPUs: {error}\n")
        sys.stderr.flush()
        os._exit(1)  # the driver would wait for a GPU that hangs
