"""DeepEP's names: calls as its users make them, on ranks of a process group, and what is not there."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ranks
import unisono

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks_find_unisono")]


@pytest.mark.parametrize(
    ("n", "program"), [(1, "deep_ep_flat"), (2, "deep_ep_flat"), (2, "deep_ep_expanded")]
)
def test_programs(n: int, program: str, tmp_path: Path) -> None:
    outcome = ranks.play(n, f"torch_group_programs:{program}", str(tmp_path / "store"), timeout_s=100)
    assert outcome.results() == [None] * n


@pytest.mark.parametrize("n", [1, 2, 3])
def test_quantised_rows(n: int, tmp_path: Path) -> None:
    outcome = ranks.play(n, "torch_rows_programs:deep_ep_quantised", str(tmp_path / "store"), timeout_s=100)
    assert outcome.results() == [None] * n


@pytest.fixture
def deep_ep() -> Any:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    return importlib.import_module("unisono.torch.deep_ep")


def test_what_is_not_there(deep_ep: Any) -> None:
    with pytest.raises(
        unisono.UsageError, match=r"deep_ep.Buffer is not in unisono.torch.deep_ep: use DeepEP"
    ):
        deep_ep.Buffer  # noqa: B018
    with pytest.raises(ImportError):  # by which programs ask whether V1 is there
        exec("from unisono.torch.deep_ep import Buffer")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        deep_ep.nonsense  # noqa: B018


def test_install(deep_ep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep_ep", "deep_ep.utils"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    deep_ep.install()
    deep_ep.install()
    assert importlib.import_module("deep_ep").ElasticBuffer is deep_ep.EPBuffer
    assert importlib.import_module("deep_ep.utils").EventOverlap is deep_ep.EventOverlap
    monkeypatch.setitem(sys.modules, "deep_ep", sys)
    with pytest.raises(unisono.UsageError, match="DeepEP itself has been imported"):
        deep_ep.install()


def test_events(deep_ep: Any) -> None:
    event = deep_ep.EventOverlap(deep_ep.EventHandle())
    event.register_hook_after_wait(lambda: 5)
    with pytest.raises(unisono.UsageError, match="has a function already"):
        event.register_hook_after_wait(lambda: 6)
    assert event.current_stream_wait() == 5 and event.wait() is None
    ran = []
    event.register_hook_after_wait(lambda: ran.append(1))
    with event(release_handle=True):
        assert not ran
    assert ran == [1] and event.event is None
    with pytest.raises(unisono.UsageError, match="no event to wait for"):
        event.current_stream_wait()
