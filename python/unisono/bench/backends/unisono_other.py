"""Another installation of Unisono in the same processes: `unisono@PREFIX`, on symmetric memory of its own."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.bench import beside
from unisono.bench.backends.base import Ranks
from unisono.bench.backends.unisono import UnisonoBackend
from unisono.records import Case
from unisono.records.vocabulary import PINGPONG


class OtherUnisonoBackend(UnisonoBackend):
    """The collectives of the installation at `prefix`, which is called by the folder's last name. What its
    version lacks is left out."""

    devices = ("cpu",)
    threads = moe = norm = matmul = False
    own_memory = True

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.name = f"unisono@{Path(prefix).expanduser().resolve().name}"
        self._package = beside.package_of(prefix)
        self._version = ""

    def version(self) -> str:
        files = [*self._package.glob("_core*.so"), *self._package.glob("lib*/libunisono.so.*")]
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]
        return f"{self._version}, build {digest}"

    def setup(self, ranks: Ranks) -> None:
        with beside.loaded(self._package, mark=self._package) as other:
            self._version = other.__version__
            communicator = other.init(ranks.rank, ranks.size, ranks)
        super().setup(replace(ranks, communicator=communicator))

    def supports(self, case: Case) -> str | None:
        verb = "batch_send_recv" if case.streams else "send_recv" if case.collective == PINGPONG else ""
        if not hasattr(self._comm, verb or case.collective):
            return f"version {self._version} has no {verb or case.collective}."
        return super().supports(case)

    def allocate(self, size: int) -> tuple[Any, Any]:
        return self._comm.empty((size,), "u8"), self._comm.empty((size,), "u8")

    def close(self) -> None:
        super().close()
        if self._comm is not None:
            self._comm.close()
