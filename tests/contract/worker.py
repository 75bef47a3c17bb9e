"""A rank, or all ranks as threads, of a contract run: `python worker.py BACKEND RANKS FOLDER
[SUITE]`.

BACKEND: unisono and gloo (under `unisono run`), unisono-threads (a process alone), mpi (under mpiexec).
unisono:aab puts each rank on the virtual node of its letter, under any launcher. RANKS: a number, or several
with commas; gloo joins as many of the started ranks as each number says. Every rank writes its report to
FOLDER/RANKS-rank.json. SUITE of Unisono: collectives, moe or norm.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import moe_body
import norm_body
import unisono
from body import OtherSubject, Report, UnisonoSubject, run
from cases import COLLECTIVES, Work, works_of_others, works_of_unisono
from unisono import bootstrap, launch
from unisono.bench.backends.base import Backend, Ranks, load
from unisono.bench.backends.unisono import is_uniform, reach_any_memory

_TIMEOUT_S = 60.0


def _reported(path: Path, body: Callable[[Report], None]) -> bool:
    """Runs `body` and writes its report, also if `body` fails. Returns whether it succeeded."""
    report = Report()
    try:
        body(report)
    except Exception:
        report.error = traceback.format_exc(limit=-3)
    report.write(path)
    return report.error is None


def _works(communicator: unisono.Communicator) -> list[Work]:
    device = "nodes" if len(communicator.nodes) > 1 else "cpu"
    algorithms = {name: list(communicator.algorithms(name, device)) for name in COLLECTIVES}
    if not is_uniform(communicator.nodes):
        algorithms = {name: [one for one in known if one != "chain"] for name, known in algorithms.items()}
    # more ranks take other ways, but combine elements alike
    whole = communicator.size <= (3 if device == "cpu" else 2)
    return works_of_unisono(communicator.size, algorithms, reach_any_memory(communicator), whole)


def _collectives(communicators: Sequence[unisono.Communicator], report: Report) -> None:
    unchecked, checked = communicators
    run(_works(unchecked), UnisonoSubject(unchecked, checked), report)


# Run a rank's whole matrix. communicators: one that does not compare calls, and one that does.
_SUITES = {"collectives": _collectives, "moe": moe_body.run, "norm": norm_body.run}


def unisono_processes(suite: str, folder: Path) -> bool:
    unchecked = unisono.init(timeout_s=_TIMEOUT_S, check=False)
    checked = unisono.init(timeout_s=_TIMEOUT_S, check=True)

    def body(report: Report) -> None:
        _SUITES[suite]((unchecked, checked), report)

    return _reported(folder / f"{checked.size}-{checked.rank}.json", body)


def unisono_threads(suite: str, ranks: int, folder: Path) -> bool:
    unchecked = unisono.init_threads(ranks, timeout_s=_TIMEOUT_S, check=False)
    checked = unisono.init_threads(ranks, timeout_s=_TIMEOUT_S, check=True)

    def body(rank: int, report: Report) -> None:
        with unchecked[rank], checked[rank]:  # closed on failure, so that the other threads end too
            _SUITES[suite]((unchecked[rank], checked[rank]), report)

    with ThreadPoolExecutor(ranks) as pool:
        one = lambda rank: _reported(folder / f"{ranks}-{rank}.json", lambda report: body(rank, report))  # noqa: E731
        return all(list(pool.map(one, range(ranks))))


def other(backend: Backend, ranks: int, here: bootstrap.Bootstrap, folder: Path) -> bool:
    """Runs a library on the first `ranks` of the started ranks. The others only help it to meet."""

    def all_gather(data: bytes) -> list[bytes]:
        return here.all_gather(data)[:ranks]

    def body(report: Report) -> None:
        backend.setup(Ranks(here.rank, ranks, all_gather, None))
        try:
            run(works_of_others(ranks), OtherSubject(here.rank, backend), report)
        finally:
            backend.close()

    if here.rank < ranks:
        return _reported(folder / f"{ranks}-{here.rank}.json", body)
    for _ in range(_MEETINGS[backend.name]):
        here.all_gather(b"")
    return True


_MEETINGS = {"gloo": 2, "mpi": 0}  # all_gathers of a backend's setup


def main(name: str, ranks: list[int], folder: Path, suite: str = "collectives") -> int:
    name, _, nodes = name.partition(":")
    if nodes:
        os.environ["UNISONO_NODE"] = nodes[launch.from_env(os.environ).rank]
    if name == "unisono":
        return 0 if unisono_processes(suite, folder) else 1
    if name == "unisono-threads":
        return 0 if all([unisono_threads(suite, n, folder) for n in ranks]) else 1
    here = bootstrap.make(launch.from_env(os.environ), timeout_s=_TIMEOUT_S * 4)
    fine = True
    for n in ranks:
        fine = other(load(name), n, here, folder) and fine
    here.all_gather(b"done")
    here.close()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(
        main(sys.argv[1], [int(part) for part in sys.argv[2].split(",")], Path(sys.argv[3]), *sys.argv[4:])
    )
