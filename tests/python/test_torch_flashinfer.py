"""FlashInfer's interface of communications: steps on ranks of a process group, and the registration."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ranks
import unisono

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks_find_unisono")]


PROGRAMS = ["torch_rows_programs:flashinfer_quantised", "torch_norm_programs:patterns"]


@pytest.mark.parametrize(
    ("n", "programs"), [(2, ["torch_group_programs:flashinfer", *PROGRAMS]), (3, PROGRAMS)], ids=["2", "3"]
)
def test_programs(n: int, programs: list[str], tmp_path: Path) -> None:
    outcome = ranks.play(n, "torch_ranks:several", str(tmp_path / "store"), *programs, timeout_s=100)
    assert outcome.results() == [[None] * len(programs)] * n


@pytest.fixture
def flashinfer_moe() -> Any:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    return importlib.import_module("unisono.torch.flashinfer_moe")


class Base(ABC):
    """The abstract methods of FlashInfer's MoEEpCommunication, whose import needs CUDA libraries."""

    @classmethod
    @abstractmethod
    def is_platform_supported(cls) -> bool: ...

    @abstractmethod
    def dispatch(self, hidden_states: Any, topk_ids: Any, topk_weights: Any = None, **more: Any) -> Any: ...

    @abstractmethod
    def combine(self, expert_output: Any, *, output: Any = None) -> Any: ...


def test_register(flashinfer_moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[str, type] = {}

    def register_communication(name: str) -> Any:
        return lambda found: registry.setdefault(name, found)

    moe_ep: Any = ModuleType("flashinfer.moe_ep")
    moe_ep.MoEEpCommunication, moe_ep.register_communication = Base, register_communication
    moe_ep.MoEEpDispatchResult = object()
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep", moe_ep)
    registered = flashinfer_moe.register()
    assert registry == {"unisono": registered} and issubclass(registered, Base)
    assert not registered.__abstractmethods__ and registered.is_platform_supported()
    assert registered.result is moe_ep.MoEEpDispatchResult


def test_register_without_flashinfer(flashinfer_moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(unisono.UsageError, match=r"pip install 'flashinfer-python>=0.7'"):
        flashinfer_moe.register()
