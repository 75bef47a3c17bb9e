"""`unisono bench --fabric`: compares the ways of the fabric lane with MPI over the same provider, and with
one pair of ranks that write alone.

`fabric_pair`: rank 1 writes to registered memory of rank 0, all other ranks asleep; one write, one wait. The
ceiling of a case is the line rate of a rank's NIC, if the provider states one. Otherwise it is fabric_pair
divided by the ranks, all of which write at once: a yardstick, not a limit, as pairs need not share that rate.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from unisono.bench.cases import CaseError
from unisono.bench.control import Control
from unisono.bench.device import HostDevice
from unisono.records import Ceiling, Link

PROVIDER, CHANNELS = "UNISONO_FABRIC_PROVIDER", "UNISONO_FABRIC_CHANNELS"
DEFAULT_CHANNELS = 4  # if there are fewer NICs, so that the policies differ
PAIR_BYTES = 64 << 20
SAMPLES = 7


def prepare_environment(env: MutableMapping[str, str], provider: str | None, channels: int | None) -> None:
    """Sets provider and channels for all ranks. Has MPICH use the same provider in place of shared memory.

    The user's variables of MPI stay. Raises CaseError, which lists the providers or says why there is no
    fabric lane."""
    if provider is not None:
        env[PROVIDER] = provider
    name, nics, most = look_up(env.get(PROVIDER, ""))
    env[PROVIDER] = name
    if channels is not None and not 1 <= channels <= most:
        raise CaseError(f"--channels {channels}: provider {name} gives 1 to {most} channels here.")
    env.setdefault(CHANNELS, str(max(nics, DEFAULT_CHANNELS)))
    if channels is not None:
        env[CHANNELS] = str(channels)
    # The name of tcp was net before libfabric 1.18, and MPI may have another libfabric than this lane.
    env.setdefault("FI_PROVIDER", "tcp,net" if name in ("tcp", "net") else name)
    env.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
    env.setdefault("MPIR_CVAR_NOLOCAL", "1")


def look_up(name: str) -> tuple[str, int, int]:
    """Returns name, NICs and most channels of the provider that the lane takes for `name`, or raises
    CaseError."""
    answer = ask(
        "p = unisono.fabric_provider(sys.argv[1]); print(p.name, p.nics, p.most_channels, sep='|')", name
    )
    found, nics, most = answer.split("|")
    return found, int(nics), int(most)


def ask(program: str, *arguments: str) -> str:
    """Returns what a line of Python prints in a process of its own. Raises CaseError for its UnisonoError.

    In this process, a libfabric loaded before MPI's would keep MPI from starting, and one loaded after would
    be MPI's."""
    program = (
        f"import sys, unisono\ntry: {program}\nexcept unisono.UnisonoError as error: sys.exit(str(error))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CaseError("libfabric has not answered within 60 s: try fi_info.") from None
    if done.returncode != 0:
        raise CaseError((done.stderr.strip().splitlines() or ["libfabric cannot be asked."])[-1])
    return done.stdout.strip()


class FabricDevice(HostDevice):
    """Host memory, with the ceiling of the fabric."""

    def ceilings(self, control: Control) -> tuple[float | None, list[Ceiling | Link]]:
        import unisono

        _, found = super().ceilings(control)
        pair = measure_pair(control)
        line = unisono.fabric_provider().line_gbps
        per_rank = pair.gbps / control.size if line is None else line / 8
        if line is not None:
            found.append(Ceiling(name="fabric_line", bytes=0, gbps=line / 8, samples_gbps=[]))
        return per_rank, [*found, pair]


class _Pair:
    """A bootstrap of the first two ranks. All ranks gather in step."""

    def __init__(self, control: Control) -> None:
        self.rank, self.size, self._control = control.rank, 2, control

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._control.gather_bytes(data)[:2]


def measure_pair(control: Control) -> Ceiling:
    """Measures `fabric_pair`, on two or more ranks, all in step. Rank 0's record counts."""
    import unisono

    samples: list[float] = []
    if control.rank < 2:
        lane = unisono.Fabric(channels=1, policy="single")
        pair: Any = unisono.Communicator(_Pair(control), timeout_s=60.0, check=False, fabric=lane)
        with pair:
            blocks = pair.empty((2, PAIR_BYTES), np.uint8)
            mine = blocks[pair.rank]
            mine[:] = pair.rank + 1
            for _ in range(SAMPLES + 1):
                pair.barrier()
                began = time.perf_counter_ns()
                pair.gather(mine, 0, blocks, algorithm="direct")
                samples.append(PAIR_BYTES / (time.perf_counter_ns() - began))
            if pair.rank == 0 and not (blocks[1] == 2).all():
                raise RuntimeError("the raw write between ranks 0 and 1 left other bytes than were sent.")
        control.gather_bytes(b"")
    else:
        for _ in range(2):  # the all_gathers of a communicator's start
            control.gather_bytes(b"")
        control.gather_bytes(b"")
    samples = samples[1:]
    return Ceiling(
        name="fabric_pair",
        bytes=PAIR_BYTES,
        gbps=control.from_root(lambda: float(np.median(samples)), float),
        samples_gbps=samples,
    )
