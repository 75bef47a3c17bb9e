"""One rank of a run that `start` has begun: `python -m unisono.bench.rank OPTIONS`. Exit code 0 also where
cases failed (the records tell), so that no launcher takes that for a crash; 1 where the run itself could not
go on."""

from __future__ import annotations

import os
import sys
import traceback

from unisono import launch
from unisono.bench import session
from unisono.bench.device import HangError
from unisono.bench.options import Options


def abort_mpi() -> None:
    """Ends the other ranks too where MPI started them: they would wait for this one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


def explain(error: BaseException) -> str:
    """One sentence for an error that Unisono raised on purpose, the traceback for any other."""
    from unisono.bench.cases import CaseError
    from unisono.errors import UnisonoError

    if isinstance(error, UnisonoError | CaseError | FileExistsError | HangError):
        return f"unisono bench: {error}"
    return "".join(traceback.format_exception(error))


def leave(error: BaseException) -> None:
    """Says what ended this rank, and ends the others where that does not happen by itself. After a hang the
    process ends here and at once: whatever it would free waits for the GPU."""
    sys.stderr.write(explain(error).rstrip() + "\n")
    sys.stderr.flush()
    abort_mpi()
    if isinstance(error, HangError):
        os._exit(1)


def bind_to_cores(world: launch.World, cores: list[int], device: str) -> None:
    """Gives each rank a core of its own where there are enough, so that no two share one by accident; all
    backends alike. On GPUs an equal share of the cores instead: libraries have threads there that must not
    hold up the one that queues calls. Ranks that another launcher has started are bound as it was told."""
    if world.local_size != world.size or world.size > len(cores):
        return
    share = len(cores) // world.size if device == "cuda" else 1
    os.sched_setaffinity(0, cores[world.local_rank * share : (world.local_rank + 1) * share])


def main(argv: list[str]) -> int:
    try:
        options = Options.unpack(argv[0])
        if options.threads:
            from unisono.bench import one_process

            one_process.run(options)
            return 0
        bind_to_cores(launch.from_env(os.environ), sorted(os.sched_getaffinity(0)), options.device)
        session.run(options, os.environ)
    except BaseException as error:
        leave(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
