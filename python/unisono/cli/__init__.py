"""The `unisono` command. Exit codes: 0 good, 1 something failed (or a gate is not passed), 2 the command
itself is wrong, 130 interrupted."""

from .app import main

__all__ = ["main"]
