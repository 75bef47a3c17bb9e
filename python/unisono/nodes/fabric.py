"""Messages between nodes by the fabric lane: remote writes of libfabric, without an MPI."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from .. import _core
from ..errors import UnisonoError
from .engine import Part, Setting

__all__ = ["FabricEngine"]

_LOOK_S = 5e-3  # between two looks at the own node
_AT_ONCE_BYTES = 256 << 10  # up to here a call is over before a thread of its own would have begun it


class FabricEngine:
    """A communicator of all ranks on the fabric lane, whose provider and channels UNISONO_FABRIC_PROVIDER and
    UNISONO_FABRIC_CHANNELS name. An exchange is a batch_send_recv; a large one goes in a thread of its own,
    so that the caller can combine meanwhile.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._comm = _core.Communicator(
            setting.bootstrap, setting.timeout_s, False, None, 0, True, _core.Fabric()
        )
        self._worker = ThreadPoolExecutor(1, "unisono-fabric")
        self._last: Future[None] | None = None

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> _Exchange:
        """See `Engine.exchange`."""
        idle = self._last is None or self._last.done()
        if idle and sum(part.data.nbytes for part in (*sends, *receives)) <= _AT_ONCE_BYTES:
            self._run(sends, receives)
            return _Exchange(self, None)
        self._last = self._worker.submit(self._run, sends, receives)
        return _Exchange(self, self._last)

    def _run(self, sends: Sequence[Part], receives: Sequence[Part]) -> None:
        try:
            self._comm.batch_send_recv(
                [(part.data, part.rank) for part in sends], [(part.data, part.rank) for part in receives]
            )
        except UnisonoError as error:
            peers = ", ".join(
                self.setting.who(rank) for rank in sorted({p.rank for p in (*sends, *receives)})
            )
            raise type(error)(
                f"the fabric failed between {self.setting.topology} and {peers}: {error}"
            ) from error

    def close(self) -> None:
        """See `Engine.close`."""
        self._comm.close()
        self._worker.shutdown(wait=False, cancel_futures=True)


class _Exchange:
    def __init__(self, engine: FabricEngine, future: Future[None] | None) -> None:
        self._engine, self._future = engine, future

    def wait(self) -> None:
        """See `Pending.wait`."""
        if self._future is None:
            return
        while not wait([self._future], _LOOK_S).done:
            self._engine.setting.look()
        self._future.result()
