"""One rank of a run of `start`: `python -m unisono.bench.rank OPTIONS`.

Exit code 0, also if cases failed, which the records say: no launcher must take that for a crash. Exit code 1:
the run itself could not go on."""

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
    """Ends the other ranks too if MPI started them, since they would wait for this one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


def explain(error: BaseException) -> str:
    """Returns one sentence for an error that Unisono raised on purpose, the traceback for any other."""
    from unisono.bench.cases import CaseError
    from unisono.errors import UnisonoError

    if isinstance(error, UnisonoError | CaseError | FileExistsError | HangError):
        return f"unisono bench: {error}"
    return "".join(traceback.format_exception(error))


def cores_of(world: launch.World, device: str) -> int | frozenset[int] | None:
    """Returns this rank's core. On GPUs: an equal share of the cores near its GPU, as libraries have threads
    there that must not delay the thread that queues calls. None: as the launcher has bound the rank."""
    local = (world.local_rank, world.local_size, world.size)
    if device != "cuda":
        return Binding.core_of(*local)
    from unisono.bench.cuda.device import near_gpus

    return Binding.share_of(*local, near_gpus(world.local_size))


def leave(error: BaseException) -> None:
    """Prints what ended this rank, and ends the other ranks of MPI, which would not end by themselves. After
    a hang, ends this process at once, since freeing anything would wait for the GPU."""
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
