"""Loads another installation of Unisono into this process, beside its own: `unisono@PREFIX`.

The package is copied under a name of its own. Two things would join both otherwise, and are kept apart. The
linker knows a shared library by its name, so that the copy's has another. nanobind keeps one table of types
for all modules of its version in a process, so that the copy's module gets a fresh one.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from unisono.bench.cases import CaseError

_PLACES = ("unisono", "lib*/python3*/site-packages/unisono")  # of a package below PREFIX


def package_of(prefix: str) -> Path:
    """Returns the folder of the package in `prefix`: an environment, a folder of pip's --target or --prefix,
    or the package itself. Raises CaseError."""
    root = Path(prefix).expanduser()
    for folder in [root, *(found for place in _PLACES for found in sorted(root.glob(place)))]:
        if prefix and (folder / "__init__.py").is_file() and any(folder.glob("_core*.so")):
            return folder.resolve()
    raise CaseError(
        f"{prefix or 'PREFIX'} holds no installation of unisono: make one by pip install --no-deps --target "
        "PREFIX, of a wheel or of a checkout."
    )


def own() -> list[Path]:
    """Returns the folders of this process's installation. An editable one has two."""
    import unisono

    return list(dict.fromkeys(Path(str(one.__file__)).parent for one in (unisono, unisono._core)))


@contextmanager
def loaded(*package: Path, mark: object) -> Iterator[ModuleType]:
    """Returns the package in these folders as a module of its own, whose files are gone after the block.

    What the block does not import cannot be imported later: it must make all communicators. `mark`: its own
    in this process."""
    name = hashlib.sha256(str(mark).encode()).hexdigest()[:7]
    with tempfile.TemporaryDirectory(prefix="unisono-beside-") as folder:
        home = Path(folder) / f"unisono_{name}"
        for part in package:
            unused = shutil.ignore_patterns("__pycache__", "include")
            shutil.copytree(part, home, ignore=unused, dirs_exist_ok=True)
        _rename_library(home, name)
        sys.path.insert(0, folder)
        try:
            with _no_types():
                module = import_module(home.name)
            yield module
        finally:
            sys.path.remove(folder)


def _rename_library(home: Path, name: str) -> None:
    """Gives libunisono.so another name of the same length, also in the files that name it."""
    ours, theirs = "libunisono.so.", f"lib{name}.so."
    for file in [*home.glob("_core*.so"), *home.glob(f"lib*/{ours}*")]:
        file.write_bytes(file.read_bytes().replace(ours.encode(), theirs.encode()))
        file.rename(file.with_name(file.name.replace(ours, theirs)))


@contextmanager
def _no_types() -> Iterator[None]:
    """Hides nanobind's tables of types, which lie in the interpreter's dictionary, in the block."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    # Returns the interpreter's own reference, where ctypes takes a py_object that is returned for a new one.
    api.PyInterpreterState_GetDict.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
    address = api.PyInterpreterState_GetDict(api.PyInterpreterState_Get())
    shared = ctypes.cast(address, ctypes.py_object).value
    hidden = {key: shared.pop(key) for key in list(shared) if "nb_internals" in str(key)}
    try:
        yield
    finally:
        shared.update(hidden)
