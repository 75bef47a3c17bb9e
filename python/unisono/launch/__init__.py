"""Finds this process's rank in a run (detect.py), and starts the ranks of a run on this machine (run.py)."""

from .detect import FD_VARIABLE, Launcher, World, from_env
from .run import run_command, run_local

__all__ = ["FD_VARIABLE", "Launcher", "World", "from_env", "run_command", "run_local"]
