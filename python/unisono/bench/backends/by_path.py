"""Modules of packages, loaded by path, without the rest of the package and what that imports."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any


@cache
def folder_of(package: str) -> Path | None:
    """Returns the folder of a package, without importing it; None: it is not installed."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def version_of(project: str) -> str:
    """Returns an installed project with its version, or nothing without its metadata."""
    try:
        return f"{project} {metadata.version(project)}"
    except metadata.PackageNotFoundError:
        return ""


@cache
def load(package: str, names: Sequence[str]) -> Any:
    """Returns the last of a package's modules, which are in the order in which they import each other."""
    root = folder_of(package)
    assert root is not None
    for parts in ([package, *name.split(".")] for name in names):
        *parents, full = accumulate(parts, "{}.{}".format)
        for parent in parents:
            sys.modules.setdefault(parent, types.ModuleType(parent))
        spec = importlib.util.spec_from_file_location(full, root.joinpath(*parts[1:]).with_suffix(".py"))
        assert spec is not None and spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
