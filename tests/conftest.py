"""Shared by all tests: modules of support/ and contract/ can be imported by name, also in the ranks of a
test.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from unisono import launch

_HERE = Path(__file__).resolve().parent
_SHARED = [str(_HERE / "support"), str(_HERE / "contract")]

sys.path[:0] = _SHARED
os.environ["PYTHONPATH"] = os.pathsep.join([*_SHARED, *filter(None, [os.environ.get("PYTHONPATH")])])
# The built-in plan, not one that `unisono tune` has left in the user's cache; and every call is compared
# first.
os.environ["UNISONO_PLAN"] = str(_HERE / "support" / "built_in_plan.json")
os.environ["UNISONO_CHECK"] = "1"
# Each bench copies memory beyond the caches, twice: up to 512 MiB on each rank, whose pages take seconds to
# come. One test leaves that as it is.
os.environ.setdefault("UNISONO_CEILING_BYTES", str(4 << 20))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def _missing(mark: str) -> str | None:
    """Why this machine cannot run the tests of a mark."""
    if mark == "mpi":
        from unisono.bench.mpis import find_mpiexec  # needs packages that a GPU machine may lack

        if find_spec("mpi4py") is None or find_mpiexec() is None:
            return "mpi4py or an mpiexec is missing: pip install mpi4py mpich"
    if mark == "torch" and find_spec("torch") is None:
        return "torch is not installed: pip install torch"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers():
        if reason := _missing(mark.name):
            pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves files of long tests to the front, so that workers that take whole files end together."""
    marks = ("slow", "mpi", "torch", "fabric", "browser")
    long = {item.path for item in items if any(map(item.get_closest_marker, marks))}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture
def ranks_find_unisono(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a test starts import the same package as the test."""
    package = str(Path(launch.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]))


# A shared machine may stop for a second: hypothesis shall not call that a failure. Under CI it picks the same
# examples every time, by itself.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "unisono", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("unisono")

# A GPU machine without a network has the packages that it has: without this one tests run without a limit.
if find_spec("pytest_timeout") is None:

    def pytest_addoption(parser: pytest.Parser) -> None:
        parser.addini("timeout", "seconds that a test may take, where pytest-timeout is installed")

    def pytest_configure(config: pytest.Config) -> None:
        config.addinivalue_line("markers", "timeout(seconds): what a test may take")
