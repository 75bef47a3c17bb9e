"""The wheels of `make wheel` and `make wheel-aarch64`, used without a compiler and without these sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EM_AARCH64, EM_X86_64 = 183, 62
PROGRAM = """
import shutil, numpy, unisono
assert not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang", "nvcc"))), "a compiler is in PATH"
with unisono.init() as comm:
    total = comm.all_reduce(numpy.full(100_000, comm.rank + 1, numpy.float32))
    assert comm.size == 2 and (total == 3).all(), (comm.size, total)
    print("sum", total[0])
"""


def wheel(processor: str) -> Path:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = sorted(ROOT.glob(f"dist/unisono-*-{python}-{python}-*_{processor}.whl"), key=os.path.getmtime)
    if not found:
        pytest.skip(f"there is no wheel for {processor}: make wheel or make wheel-aarch64")
    return found[-1]


def run(argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, f"{argv}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


def bare(venv: Path) -> dict[str, str]:
    """Returns the environment of a machine with this virtual environment and nothing else in PATH."""
    return {"PATH": str(venv / "bin"), "HOME": str(venv), "LANG": "C.UTF-8"}


TORCH_PROGRAM = """
import shutil, sys, torch, torch.distributed as dist
assert not any(map(shutil.which, ("c++", "g++"))), "a compiler is in PATH"
torch.__version__ = sys.argv[1]
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
print("sum", x[0].item())
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a virtual environment with the x86-64 wheel and its dependencies."""
    path = wheel("x86_64")
    if sysconfig.get_platform() != "linux-x86_64":
        pytest.skip("this machine has another processor")
    made = tmp_path_factory.mktemp("wheel") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", made])
    run([sys.executable, "-m", "pip", "--python", made, "install", "-q", path])
    return made


@pytest.mark.slow
def test_runs_without_a_compiler(venv: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    printed = run([venv / "bin/unisono", "run", "-n", "2", "python", program], bare(venv))
    assert printed.count("sum 3.0") == 2, printed


@pytest.mark.slow
def test_a_cmake_project_finds_the_library(venv: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no CMake or no C++ compiler")
    package = run([venv / "bin/unisono", "--cmake-dir"], bare(venv)).strip()
    assert Path(package).is_relative_to(venv), package
    run(["cmake", "-S", ROOT / "tests/consumer", "-B", tmp_path, f"-Dunisono_DIR={package}"])
    run(["cmake", "--build", tmp_path])
    assert "the sum is 3 on rank 0" in run([tmp_path / "with_unisono"], bare(venv))


@pytest.mark.slow
@pytest.mark.torch
def test_brings_the_adapter_of_one_torch(venv: Path, tmp_path: Path) -> None:
    """With that torch nothing is compiled. Another version wants a compiler."""
    import torch

    with zipfile.ZipFile(wheel("x86_64")) as opened:
        if not any("/prebuilt/" + torch.__version__ in name for name in opened.namelist()):
            pytest.skip("the wheel was made without this torch")
    [packages] = venv.glob("lib/python3*/site-packages")
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    program = tmp_path / "program.py"
    program.write_text(TORCH_PROGRAM)
    cache = tmp_path / "cache"
    env = bare(venv) | {"XDG_CACHE_HOME": str(cache)}
    assert "sum 1.0" in run([venv / "bin/python", program, torch.__version__], env)
    assert not cache.exists()
    other = [venv / "bin/python", program, "0.0"]
    ended = subprocess.run(other, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode and "there is no C++ compiler: install g++" in ended.stderr, ended.stderr[-3000:]


@pytest.mark.parametrize(("processor", "machine"), [("x86_64", EM_X86_64), ("aarch64", EM_AARCH64)])
def test_contents(processor: str, machine: int) -> None:
    """The wheel has one copy of the library, for the tag's processor, without paths of the build machine.

    It may have adapters for torch, and none of torch's libraries.
    """
    path = wheel(processor)
    assert "-manylinux_" in path.name, path.name
    with zipfile.ZipFile(path) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    binaries = {name: data for name, data in files.items() if data.startswith(b"\x7fELF")}
    own = [name for name in binaries if "/torch/distributed/prebuilt/" not in name]
    assert len(own) == 2, sorted(binaries)
    extension = next(name for name in binaries if "_core" in name)
    assert extension.endswith(f"-{processor}-linux-gnu.so"), extension
    for name, data in binaries.items():
        assert int.from_bytes(data[18:20], "little") == machine, name
        assert str(ROOT).encode() not in data, f"{name} names the folder of its sources"
        assert b"/libfabric.so" not in data, f"{name} names a place of libfabric"
    for name in (
        "_core.pyi",
        "include/unisono/communicator.hpp",
        "include/unisono/unisono.h",
        "lib/cmake/unisono/unisono-config.cmake",
        "lib/pkgconfig/unisono.pc",
        "lib/libunisono.so",
    ):
        assert f"unisono/{name}" in files, sorted(files)
