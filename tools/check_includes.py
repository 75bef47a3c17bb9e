"""Checks that includes point down: no file includes a header of a layer above its own.

Usage: check_includes.py [ROOT]. Prints FILE:LINE for each include that points up; the exit status is then 1.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# From the bottom up, as in DESIGN.md. Folders of one row do not include each other.
LAYERS = (
    ("include/unisono",),
    ("src/base",),
    ("src/lane",),
    ("src/programs",),
    ("src/core",),
    ("src/host",),
    ("src/cuda",),
    ("src/fabric",),
    ("src/moe", "src/fused", "src/nodes"),
    ("src/backends.cpp",),
    ("src/c",),
    ("bindings",),
)
HEIGHT = {folder: height for height, layer in enumerate(LAYERS) for folder in layer}
INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
SUFFIXES = {".hpp", ".cpp", ".cuh", ".cu", ".h"}


def folder_of(path: Path) -> str | None:
    """Returns the folder of LAYERS that holds a path, which is relative to the root."""
    return next((str(p) for p in (path, *path.parents) if str(p) in HEIGHT), None)


def wrong_includes(root: Path) -> list[str]:
    """Returns a line for each include that points up, or to another folder of its layer."""
    wrong = []
    files = [path for top in ("include", "src", "bindings") for path in sorted((root / top).rglob("*"))]
    for path in files:
        if path.suffix not in SUFFIXES:
            continue
        own = path.relative_to(root)
        mine = folder_of(own)
        if mine is None:
            wrong.append(f"{own}: its folder has no layer in tools/check_includes.py: give it one.")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not (found := INCLUDE.match(line)):
                continue
            places = (top / found[1] for top in (own.parent, Path("include"), Path("src")))
            header = next((place for place in places if (root / place).is_file()), None)
            theirs = folder_of(header) if header else None  # headers that CMake generates are not found
            if theirs and theirs != mine and HEIGHT[theirs] >= HEIGHT[mine]:
                wrong.append(f"{own}:{number}: {mine} must not include {found[1]}, which is not below it.")
    return wrong


if __name__ == "__main__":
    found = wrong_includes(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
