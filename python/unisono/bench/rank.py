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

    if isinstance(error, UnisonoError | CaseError | FileExistsError):
        return f"unisono bench: {error}"
    return "".join(traceback.format_exception(error))


def main(argv: list[str]) -> int:
    try:
        world = launch.from_env(os.environ)
        core = Binding.core_of(world.local_rank, world.local_size, world.size)
        session.run(Options.unpack(argv[0]), os.environ, core)
    except BaseException as error:
        sys.stderr.write(explain(error).rstrip() + "\n")
        abort_mpi()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
