"""DeepEP's names: calls as its users make them, on ranks of a process group, and what is not there."""

from __future__ import annotations

import importlib
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ranks
import threads
import unisono

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks_find_unisono")]


PROGRAMS = [
    "torch_group_programs:deep_ep_flat",
    "torch_group_programs:deep_ep_expanded",
    "torch_rows_programs:deep_ep_quantised",
    "deep_ep_v1_programs:megatron",
    "deep_ep_v1_programs:normal",
    "deep_ep_low_latency_programs:low_latency",
]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_programs(n: int, tmp_path: Path) -> None:
    outcome = ranks.play(n, "torch_ranks:several", str(tmp_path / "store"), *PROGRAMS, timeout_s=200)
    assert outcome.results() == [[None] * len(PROGRAMS)] * n


@pytest.fixture
def deep_ep() -> Any:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    return importlib.import_module("unisono.torch.deep_ep")


def test_what_is_not_there(deep_ep: Any) -> None:
    with pytest.raises(
        unisono.UsageError, match=r"deep_ep.HybridEPBuffer is not in unisono.torch.deep_ep: use DeepEP"
    ):
        deep_ep.HybridEPBuffer  # noqa: B018
    with pytest.raises(ImportError):  # by which programs ask whether it is there
        exec("from unisono.torch.deep_ep import HybridEPBuffer")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        deep_ep.nonsense  # noqa: B018


def test_install(deep_ep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep_ep", "deep_ep.utils"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    deep_ep.install()
    deep_ep.install()
    assert importlib.import_module("deep_ep").ElasticBuffer is deep_ep.EPBuffer
    assert importlib.import_module("deep_ep").Buffer is deep_ep.Buffer
    assert importlib.import_module("deep_ep.utils").EventOverlap is deep_ep.EventOverlap
    monkeypatch.setitem(sys.modules, "deep_ep", sys)
    with pytest.raises(unisono.UsageError, match="DeepEP itself has been imported"):
        deep_ep.install()


def test_a_moe_grows_and_is_freed(deep_ep: Any) -> None:
    """More tokens, or more living handles than there is room for, make another Moe. The old one goes with its
    handles."""
    from unisono.torch.deep_ep.moes import Moes, Routing

    with threads.team(1) as (comm,):
        moes = Moes(comm, 2)

        def make(max_tokens: int, handles: int) -> Any:
            return comm.moe(2, 1, 4, max_tokens, options=unisono.MoeOptions(handles=handles))

        def route(tokens: int) -> Any:
            kept = moes.take("kind", tokens, make)
            routing = Routing(kept.moe, None, tokens, True)
            kept.add(routing)
            return routing

        few = [route(5), route(16)]
        assert few[0].moe is few[1].moe and few[0].moe.max_tokens == 16
        first = weakref.ref(few[0].moe)
        third = route(3)
        assert third.moe is not first() and third.moe.options.handles == 4 and third.moe.max_tokens == 16
        larger = route(1000)
        assert larger.moe.max_tokens == 1024 and larger.moe.options.handles == 4
        few.clear()
        assert all(route(1).moe is larger.moe for _ in range(3))
        assert first() is not None  # the third handle is alive, and its Moe was replaced too
        del third
        assert route(1).moe is not larger.moe and first() is None  # one routing keeps its place among 4
        kept = route(1)
        assert kept.moe.options.handles == 4
        del larger
        assert all(route(1).moe is kept.moe for _ in range(2))


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
