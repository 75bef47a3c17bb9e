"""Builds the adapter between torch and libunisono, once for each torch, and loads it.

A wheel may bring the adapter for one torch (tools/prebuild.py).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from ... import __version__, _core
from ...errors import ResourceError
from ...files import cache

__all__ = ["built", "load", "prebuilt"]

NAME = "_unisono_torch_distributed"
SOURCES = (
    *("backend.cpp", "blocks.cpp", "calls.cpp", "gpu.cpp", "routes.cpp"),
    *("backend.hpp", "blocks.hpp", "gpu.hpp", "routes.hpp", "tensors.hpp"),
)


@functools.cache
def load() -> Any:
    """Returns the module of the adapter, which is built if the cache has none for this torch and Unisono.

    Raises:
        ResourceError: It cannot be built or loaded. The message says what to do.
    """
    path = built()
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except ImportError as error:
        raise ResourceError(
            f"the adapter for torch does not load ({error}): delete {path.parent}."
        ) from error
    return module


def built() -> Path:
    """Returns the path of the adapter. Builds it if it is not there, while other processes wait."""
    if prebuilt().exists():
        return prebuilt()
    of_user = cache()
    if not of_user:
        raise ResourceError("there is no folder for the adapter for torch: set XDG_CACHE_HOME to one.")
    folder = of_user / "torch" / key()
    path = folder / f"{NAME}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                build(Path(work)).rename(path)
    return path


def prebuilt() -> Path:
    """Returns the path of the adapter that the package itself has, if it was made for this key."""
    return Path(__file__).parent / "prebuilt" / f"{key()}.so"


@functools.cache
def key() -> str:
    """Returns what one build is good for: torch, Python, the sources, and the library with its headers."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in [
        Path(__file__),
        *(here / name for name in SOURCES),
        *sorted((package() / "include").rglob("*.h*")),
    ]:
        digest.update(path.read_bytes())
    abi = int(torch.compiled_with_cxx11_abi())
    tag = sysconfig.get_config_var("SOABI")
    return f"{torch.__version__}-abi{abi}-{tag}-{__version__}-{digest.hexdigest()[:16]}"


def package() -> Path:
    """Returns the folder of the installed package, with headers and the library that Python has loaded."""
    return Path(_core.__file__).parent


def build(work: Path) -> Path:
    """Compiles the adapter in `work`, and returns its path."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise ResourceError(
            "the backend unisono of torch.distributed is compiled when it is first used, and there is no C++ "
            "compiler: install g++, or name one in CXX."
        )
    of_torch = Path(torch.__file__).parent
    library = next((package() / "lib").glob("libunisono.so.*"))
    headers = [
        of_torch / "include",
        of_torch / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    ]
    compile_one = [
        *compiler.split(),
        *"-std=c++20 -O2 -fPIC -fvisibility=hidden -w".split(),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(
            f"-ffile-prefix-map={folder.parent}/="
            for folder in (package(), Path(__file__).parents[2], of_torch)
        ),
        f"-I{package() / 'include'}",
        *(f"-isystem{folder}" for folder in headers),
    ]
    sources = [Path(__file__).parent / name for name in SOURCES if name.endswith(".cpp")]
    objects = [work / f"{source.stem}.o" for source in sources]
    pairs = zip(sources, objects, strict=True)
    run_all([[*compile_one, "-c", str(source), "-o", str(to)] for source, to in pairs])
    libraries = [of_torch / "lib" / f"lib{name}.so" for name in ("c10", "torch_cpu", "torch_python")]
    out = work / f"{NAME}.so"
    parts = map(str, [*objects, library, *libraries, *loaded("libstdc++.so")])
    run_all([[*compiler.split(), "-shared", "-s", *parts, "-o", str(out)]])
    return out


def loaded(name: str) -> list[str]:
    """Returns the path of a library that this process has loaded.

    torch's own libstdc++ must be the adapter's too. A g++ that has only libstdc++.a would give the adapter a
    second one, whose streams mix with the first's and crash.
    """
    maps = Path("/proc/self/maps").read_text()
    return re.findall(rf"/.*/{re.escape(name)}.*", maps)[:1]


def run_all(commands: list[list[str]]) -> None:
    """Runs commands side by side. Raises ResourceError with the first error of one that fails."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    texts = [process.communicate()[0] for process in running]
    for process, text in zip(running, texts, strict=True):
        if process.returncode:
            lines = (
                [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no message"]
            )
            raise ResourceError(
                f"the backend unisono of torch.distributed does not compile ({lines[0].strip()}): install "
                f"g++ 11 or newer and the headers of Python, or report it for torch {torch.__version__}."
            )
