"""Identifies the machine and the network namespace of a process."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["boot", "network"]


def boot() -> str:
    """Returns the machine's boot id, the same for all its processes until the next boot; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def network() -> str:
    """Returns an id of this network namespace. Processes with the same id share interfaces and addresses."""
    try:
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        namespace = ""
    return f"{boot()}/{namespace}"  # every machine numbers its namespaces alike
