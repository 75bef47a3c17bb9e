"""Writes records."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from unisono.errors import ResourceError

from .schema import Record

FILE_NAME = "records.jsonl"
_encoder = msgspec.json.Encoder()


class RecordsWriter:
    """Appends records to `directory`/records.jsonl, a whole line and a flush each: a cut loses one line. A
    method raises ResourceError, which names the file, if the disk refuses. Later records are dropped.

    Raises FileExistsError if the file exists. With `more` the file may hold earlier launches, and end in the
    middle of a line."""

    def __init__(self, directory: Path, more: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE_NAME
        last = self.path.read_bytes()[-1:] if more and self.path.exists() else b""
        self._file: IO[bytes] = open(self.path, "ab" if more else "xb")  # noqa: SIM115  (closed in close)
        if last not in (b"", b"\n"):
            self._file.write(b"\n")

    def write(self, record: Record) -> None:
        if self._file.closed:
            return
        with self._writing():
            self._file.write(_encoder.encode(record) + b"\n")
            self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            with self._writing():
                os.fsync(self._file.fileno())
                self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()  # now, since a later close would fail again
            raise ResourceError(
                f"{self.path} cannot be written: {error.strerror}. It holds what was recorded until then."
            ) from error
