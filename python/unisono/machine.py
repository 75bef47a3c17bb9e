"""What processes of one machine, or of one network namespace, have in common."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["boot", "network"]


def boot() -> str:
    """Returns what all processes of this machine share until it starts again; "" if not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def network() -> str:
    """Returns what all processes of this network namespace share: interfaces and addresses are theirs."""
    try:
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        namespace = ""
    return f"{boot()}/{namespace}"  # every machine numbers its namespaces alike
