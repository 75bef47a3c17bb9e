"""The memory of what libraries that use torch allocate in their calls."""

from __future__ import annotations

from typing import Any

from unisono.bench.backends.base import ResultCall


class Temporaries:
    """A pool of torch's allocator. A graph that has captured calls uses what they have allocated at each run,
    though it is free for the allocator: nobody else may get that memory."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._pool = torch.cuda.MemPool()

    def bound(self, call: ResultCall) -> ResultCall:
        """Returns the call with its memory from the pool. Calls of other cases may overwrite its result."""
        use, pool = self._torch.cuda.use_mem_pool, self._pool

        def with_pool() -> None:
            with use(pool):
                call()

        return ResultCall(with_pool, call.result)
