"""DeepEP's names over `unisono.Moe`, for programs that import `deep_ep`: V2's EPBuffer, V1's Buffer.

>>> import unisono.torch.deep_ep
>>> unisono.torch.deep_ep.install()  # `import deep_ep` means this module from now on

dispatch and combine take and return what DeepEP's do, on GPUs and on CPUs, also of rows that the caller has
quantised. Rows come in a stable order, with and without `deterministic`. Some parts are not here, and raise
an error that says so: balancing of experts, and buffers for other purposes; of V1 internode_dispatch and
internode_combine, masked ranks, timed waits, logfmt, and access to streams and raw buffers.

A buffer makes its memory in the first dispatch of a kind (experts, top-k, layout, alignment). Run such a
dispatch before a CUDA graph captures one. `EPBuffer.handles` says how many routings a buffer keeps. Training
needs as many as layers times micro-batches in flight. A V1 Buffer keeps those whose handles are alive, except
with num_worst_tokens and low latency. The numbers of SMs and queue pairs change nothing.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from ...errors import UsageError
from .buffer import EPBuffer
from .config import Config
from .event import EventHandle, EventOverlap
from .handle import EPHandle
from .missing import missing
from .v1 import Buffer

__all__ = [
    "Buffer",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "install",
    "topk_idx_t",
]

ElasticBuffer = EPBuffer  # its name until V2.5
topk_idx_t = torch.int64

_MISSING = "HybridEPBuffer EngramBuffer PPBuffer BucketBuffer BufferAllocator".split()


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise missing(f"deep_ep.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install() -> None:
    """Lets `import deep_ep` and `import deep_ep.utils` mean this module.

    Raises:
        UsageError: DeepEP itself has been imported.
    """
    here = sys.modules[__name__]
    if sys.modules.get("deep_ep", here) is not here:
        raise UsageError("DeepEP itself has been imported: call install() before.")
    utils: Any = ModuleType("deep_ep.utils", "EventHandle and EventOverlap.")
    utils.EventHandle, utils.EventOverlap = EventHandle, EventOverlap
    sys.modules.update({"deep_ep": here, "deep_ep.utils": utils})
