"""Checks that includes point down: no file includes a header of a layer above its own. And that a source
uses each name that it declares by `using`, which clang-tidy sees only in sources that it reads by themselves.

Usage: check_includes.py [ROOT]. Prints FILE:LINE for each that is wrong; the exit status is then 1.
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
USING = re.compile(r"\s*using\s+[\w:]+::(\w+);")
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


def unused_names(root: Path) -> list[str]:
    """Returns a line for each name that a source declares by `using` and has nowhere else."""
    unused = []
    for path in (
        path for top in ("src", "bindings", "tests/cpp") for path in sorted((root / top).rglob("*.cpp"))
    ):
        text = path.read_text()
        for number, line in enumerate(text.splitlines(), 1):
            if (found := USING.match(line)) and len(re.findall(rf"\b{found[1]}\b", text)) == 1:
                unused.append(
                    f"{path.relative_to(root)}:{number}: nothing uses {found[1]}: remove its using."
                )
    return unused


if __name__ == "__main__":
    top = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    found = wrong_includes(top) + unused_names(top)
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
