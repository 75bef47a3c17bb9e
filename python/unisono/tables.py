"""Finds the user's plan tables, which `unisono tune` writes, and gives a communicator those for it."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import files
from .errors import UsageError

if TYPE_CHECKING:
    from ._core import Communicator

__all__ = ["MOST_BYTES", "Tables", "name_of", "path", "read"]

# The largest file of tables, in bytes. Rank 0 sends file and path in one all_gather of the bootstrap, which
# carries 1 MiB (hub.MAX_PAYLOAD); 64 KiB are left for the path. An entry that `unisono tune` writes has about
# 110 bytes, so that some 8,900 entries fit. The tables of a machine have a few hundred.
MOST_BYTES = (1 << 20) - (1 << 16)

_names: weakref.WeakKeyDictionary[Communicator, str] = weakref.WeakKeyDictionary()


def path() -> Path | None:
    """Returns where rank 0 looks for the file: UNISONO_PLAN, else in the user's cache; None if the user has
    no home."""
    if named := os.environ.get("UNISONO_PLAN"):
        return Path(named)
    cache = files.cache()
    return cache / "plan.json" if cache else None


def read(file: Path) -> str:
    """Returns the text of a file of tables. Raises UsageError, which names the file, if it cannot be read, is
    larger than MOST_BYTES or holds a byte 0."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:,} bytes")
        if 0 in content:
            raise ValueError("a byte 0 in it")
        return content.decode()
    except (OSError, ValueError) as error:
        raise UsageError(_unreadable(file, error)) from error


class Tables(NamedTuple):
    """A file of plan tables: its path (empty if there is no file) and text, or why it cannot be used."""

    path: str = ""
    text: str = ""
    refusal: str = ""

    @classmethod
    def find(cls) -> Tables:
        """Returns the tables of the file that `path` names."""
        found = path()
        if found is None or not found.is_file():
            named = os.environ.get("UNISONO_PLAN")
            why = f"UNISONO_PLAN={named} is not a file: write it with `unisono tune`, or unset it."
            return cls(refusal=why if named else "")
        try:
            return cls(str(found), read(found))
        except UsageError as error:
            return cls(refusal=str(error))

    @classmethod
    def of_rank_0(cls, meeting: Any) -> Tables:
        """Returns rank 0's tables on every rank, since plans that differ give wrong results. Collective.
        Raises UsageError if rank 0 runs another version of Unisono."""
        if meeting.size == 1:
            return cls.find()
        found = "\0".join(cls.find()) if meeting.rank == 0 else ""
        received = meeting.all_gather(found.encode(errors="surrogateescape"))[0]
        try:
            return cls._make(received.decode(errors="surrogateescape").split("\0"))
        except TypeError:
            raise UsageError(
                "rank 0 runs another version of Unisono: start every rank with the same one."
            ) from None

    def load(self, communicator: Communicator) -> None:
        """Gives the communicator the tables for its ranks. Raises UsageError if the file cannot be used."""
        if self.refusal:
            raise UsageError(self.refusal)
        try:
            for table in self._tables():
                if not _is_for(table, communicator):
                    continue
                entries = [_entry(entry) for entry in table["entries"]]
                communicator.set_plan(entries, table.get("device", "cpu"))
                _names[communicator] = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(_unreadable(self.path, error)) from error

    def in_words(self) -> str:
        """Returns a text that names the tables by which communicators made here choose algorithms."""
        if not self.path:
            return self.refusal or f"built in; `unisono tune` writes {path() or 'a table'}"
        try:
            kinds = [f"{table['ranks']} ranks on {table.get('card', 'CPUs')}" for table in self._tables()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return _unreadable(self.path, error)
        return f"{self.path}, for {', '.join(kinds)}; else built in"

    def _tables(self) -> list[dict[str, Any]]:
        found = json.loads(self.text) if self.path else []
        return found if isinstance(found, list) else [found]


def name_of(communicator: Communicator) -> str | None:
    """Returns the first 12 digits of the SHA-256 of the communicator's file of tables; None: the built-in
    tables."""
    return _names.get(communicator)


def _is_for(table: dict[str, Any], communicator: Communicator) -> bool:
    """Returns whether a table is for this communicator: a table of `nodes` for all ranks on that many nodes,
    one of `cpu` or `cuda` for the ranks of this node."""
    device = table.get("device", "cpu")
    if device == "nodes":
        nodes = communicator.nodes
        return bool(len(nodes) > 1 and (table["nodes"], table["ranks"]) == (len(nodes), communicator.size))
    here = next(len(ranks) for ranks in communicator.nodes if communicator.rank in ranks)
    if table["ranks"] != here:
        return False
    if device == "cpu":
        return True
    # tables are for GPUs that reach each other
    return bool(communicator.peer_access and table["card"] == communicator.card)


def _entry(entry: dict[str, Any]) -> tuple[Any, ...]:
    shape = (entry.get("blocks", 0), entry.get("threads", 0), entry.get("piece_bytes", 0))
    symmetric = entry["memory"] == "symmetric"
    return (entry["collective"], symmetric, entry["up_to_bytes"], entry["algorithm"], shape)


def _unreadable(file: Path | str, error: Exception) -> str:
    why = f"{type(error).__name__}: {error}".split("\n")[0]
    return f"{file} is not a plan table that can be read ({why}): write it again with `unisono tune`."
