"""Where this process is in a run (detect.py), and starting the ranks of a run on this machine (run.py)."""

from .detect import FD_VARIABLE, Launcher, World, from_env
from .run import run_command, run_local

__all__ = ["FD_VARIABLE", "Launcher", "World", "from_env", "run_command", "run_local"]
