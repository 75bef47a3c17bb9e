"""Modules of packages, loaded without the rest of the package and what that imports."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
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
def load(package: str, module: str, bare: Sequence[str] = ()) -> Any:
    """Returns a module of a package. The __init__ of the packages that it lies in does not run, nor that of
    `bare` ones, from which it imports."""
    root = folder_of(package)
    assert root is not None
    for inner in (module.rpartition(".")[0], *bare):
        parts = [package, *filter(None, inner.split("."))]
        for depth, name in enumerate(accumulate(parts, "{}.{}".format)):
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(root.joinpath(*parts[1 : depth + 1]))]
            sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    return importlib.import_module(f"{package}.{module}")
