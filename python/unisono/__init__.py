"""Unisono: collective communication between the ranks of a machine or of several, and the bench that
proves it.

>>> import numpy, unisono
>>> with unisono.init() as comm:
...     total = comm.all_reduce(numpy.ones(4, numpy.float32))
"""

from ._core import (
    ANY_SOURCE,
    Communicator,
    Fabric,
    FabricProvider,
    Moe,
    MoeHandle,
    MoeOptions,
    MoeReceived,
    NormOptions,
    Received,
    Registration,
    Work,
    device_count,
    fabric_provider,
    fabric_providers,
    fabric_version,
)
from ._core import version as __version__
from .communicator import Communicators, init, init_all, init_threads
from .errors import MismatchError, PeerLostError, ResourceError, TimeoutError, UnisonoError, UsageError

__all__ = [
    "ANY_SOURCE",
    "Communicator",
    "Communicators",
    "Fabric",
    "FabricProvider",
    "MismatchError",
    "Moe",
    "MoeHandle",
    "MoeOptions",
    "MoeReceived",
    "NormOptions",
    "PeerLostError",
    "Received",
    "Registration",
    "ResourceError",
    "TimeoutError",
    "UnisonoError",
    "UsageError",
    "Work",
    "__version__",
    "device_count",
    "fabric_provider",
    "fabric_providers",
    "fabric_version",
    "init",
    "init_all",
    "init_threads",
]
