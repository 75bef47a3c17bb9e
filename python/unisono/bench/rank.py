"""One rank of a run that `start` has begun: `python -m unisono.bench.rank OPTIONS`. Exit code 0 also where
cases failed (the records tell), so that no launcher takes that for a crash; 1 where the run itself could not
go on."""

from __future__ import annotations

import os
import sys
import traceback

from unisono import launch
from unisono.bench import session
from unisono.bench.binding import Binding
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


def cores_of(world: launch.World, device: str) -> int | frozenset[int] | None:
    """A core of its own for each rank, on GPUs an equal share of those near its GPU: libraries have threads
    there that must not hold up the one that queues calls. None: as the launcher has bound it."""
    local = (world.local_rank, world.local_size, world.size)
    if device != "cuda":
        return Binding.core_of(*local)
    from unisono.bench.cuda.device import near_gpus

    return Binding.share_of(*local, near_gpus(world.local_size))


def leave(error: BaseException) -> None:
    """Says what ended this rank, and ends the others where that does not happen by itself. After a hang the
    process ends here and at once: whatever it would free waits for the GPU."""
    sys.stderr.write(explain(error).rstrip() + "\n")
    sys.stderr.flush()
    abort_mpi()
    if isinstance(error, HangError):
        os._exit(1)


def main(argv: list[str]) -> int:
    try:
        options = Options.unpack(argv[0])
        if options.threads:
            from unisono.bench import one_process

            one_process.run(options)
            return 0
        world = launch.from_env(os.environ)
        session.run(options, Binding(cores_of(world, options.device)))
    except BaseException as error:
        leave(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
