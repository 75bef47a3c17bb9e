"""Wrong calls of mixture of experts, and ranks that die in one: each error says what to do, and the ranks go
on if nothing has been sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranks
import threads
import unisono
from faults import NOTICED_S, assert_lost, assert_nothing_left, error_of

F32 = np.float32
HIDDEN, MOST, TOP_K = 8, 4, 2
IDX = np.array([[0, 1], [2, 3], [1, -1]])
X = np.arange(3 * HIDDEN, dtype=F32).reshape(3, HIDDEN)
Call = Callable[[unisono.Moe, int], Any]


def make(comm: unisono.Communicator, dtype: str = "float32", **options: Any) -> unisono.Moe:
    return comm.moe(2 * comm.size, TOP_K, HIDDEN, MOST, dtype, unisono.MoeOptions(**options))


def works(moe: unisono.Moe) -> None:
    """Checks a whole round, in which each expert's rank returns what has come."""
    d = moe.dispatch(X, IDX)
    ranks_of = np.array([len({e // moe.local_experts for e in token if e >= 0}) for token in IDX.tolist()])
    np.testing.assert_array_equal(moe.combine(d.x, d.handle), X * ranks_of[:, None])


def refused(kind: type[Exception], words: str, call: Call, n: int = 2, **options: Any) -> list[Exception]:
    """Makes a call on every rank, which must raise an error with the words. A round must work after it."""

    def body(comm: unisono.Communicator) -> Exception:
        moe = make(comm, **options)
        with pytest.raises(kind, match=words) as caught:
            call(moe, comm.rank)
        works(moe)
        return caught.value

    with threads.team(n) as comms:
        errors: list[Exception] = threads.together(comms, body)
    assert all(str(error).endswith(".") and "\n" not in str(error) for error in errors), errors
    return errors


@pytest.mark.parametrize(
    ("numbers", "options", "words"),
    [
        ((3, 1, 8, 4), {}, "num_experts=3 cannot be divided among 2 ranks"),
        ((4, 5, 8, 4), {}, "top_k=5 of 4 experts"),
        ((4, 0, 8, 4), {}, "top_k=0"),
        ((4, 1, 0, 4), {}, "hidden=0"),
        ((4, 1, -1, 4), {}, "hidden=-1 cannot be"),
        ((4, 1, 8, 0), {}, "max_tokens=0"),
        ((4, 1, 8, 4), {"alignment": 8}, "alignment=8"),
        ((4, 1, 8, 4), {"layout": "rank_major", "capacity": 3}, "rank_major has room for every row"),
        ((4, 1, 8, 4), {"drop": True}, "drop=True needs a capacity"),
        ((4, 1, 8, 4), {"handles": 0}, "handles=0"),
        ((4, 1, 8, 4), {"device": "cuda"}, "the communicator has no GPU"),
    ],
)
def test_layer_that_cannot_be(numbers: tuple[int, ...], options: dict[str, Any], words: str) -> None:
    def body(comm: unisono.Communicator) -> None:
        with pytest.raises(unisono.UsageError, match=words):
            comm.moe(*numbers, "float32", unisono.MoeOptions(**options))
        works(make(comm))

    threads.with_threads(2, body)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "rows"}, 'no layout "rows": use flat, rank_major or expert_major'),
        ({"scales": "int8"}, 'no scales "int8": use e4m3_128 or mx'),
        ({"device": "tpu"}, "use cpu or cuda"),
        ({"capacity": -1}, "capacity=-1"),
        ({"more_bytes": -1}, "more_bytes=-1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(unisono.UsageError, match=words):
        unisono.MoeOptions(**options)


def test_dtype_that_cannot_be() -> None:
    def body(comm: unisono.Communicator) -> None:
        with pytest.raises(unisono.UsageError, match="i8 cannot be combined: use float32"):
            make(comm, "int8")

    threads.with_threads(2, body)


@pytest.mark.parametrize(
    "other",
    [
        {"hidden": 16},
        {"dtype": "float16"},
        {"layout": "rank_major"},
        {"host_counts": True},
        {"capacity": 9},
        {"more_bytes": 8},
        {"handles": 3},
    ],
    ids=lambda other: next(iter(other)),
)
def test_layers_that_differ(other: dict[str, Any]) -> None:
    """No rank makes its layer, and the communicator goes on."""

    def body(comm: unisono.Communicator) -> None:
        options = {"hidden": 8, "dtype": "float32", **(other if comm.rank == 1 else {})}
        hidden, dtype = options.pop("hidden"), options.pop("dtype")
        with pytest.raises(unisono.UsageError, match="rank 1 makes another moe than rank 0"):
            comm.moe(4, 2, hidden, 4, dtype, unisono.MoeOptions(**options))
        works(make(comm))

    threads.with_threads(2, body)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("way", ["dispatch", "combine"])
def test_layers_that_change_places(way: str, check: bool) -> None:
    """All ranks have two layers, which may differ in host_counts alone, and one rank calls the other one."""

    def body(comm: unisono.Communicator) -> None:
        layers = [make(comm), make(comm, host_counts=True)]
        rounds = [moe.dispatch(X, IDX) for moe in layers] if way == "combine" else []
        with pytest.raises(unisono.MismatchError) as error:
            if way == "combine":
                layers[comm.rank].combine(rounds[comm.rank].x, rounds[comm.rank].handle)
            else:
                layers[comm.rank].dispatch(X, IDX)
        if way == "dispatch":
            assert "but rank 1 rows of 32 bytes" in str(error.value)
            assert str(error.value).endswith(", by another moe: make the same call on every rank.")

    threads.with_threads(2, body, check=check)


def array_calls() -> dict[str, tuple[str, Call]]:
    """Returns calls with a wrong array, and the words of the error."""
    weights = np.ones((3, 2), F32)
    y = np.zeros((8, HIDDEN), F32)

    def combine(*args: Any, **more: Any) -> Call:
        return lambda moe, rank: moe.combine(*args[:1], moe.dispatch(X, IDX, weights).handle, **more)

    return {
        "width": (
            "a row of x has 36 bytes, but the moe is made for 32: give rows of at most as many",
            lambda m, _: m.dispatch(np.zeros((3, 9), F32), IDX),
        ),
        "no width": (
            r"x has shape \(3, 0\): this Moe takes \(tokens, 8\)",
            lambda m, _: m.dispatch(X[:, :0].copy(), IDX),
        ),
        "axes": (r"x has shape \(24,\)", lambda m, _: m.dispatch(X.ravel(), IDX)),
        "gaps": ("x is not contiguous", lambda m, _: m.dispatch(np.zeros((3, 16), F32)[:, ::2], IDX)),
        "no x": ("x is an empty tuple", lambda m, _: m.dispatch((), IDX)),
        "no array": ("x is a list", lambda m, _: m.dispatch([1.0], IDX)),
        "no experts": ("needs topk_idx, or the handle", lambda m, _: m.dispatch(X)),
        "experts": (
            r"topk_idx has shape \(3, 1\): this call takes \(3, 2\)",
            lambda m, _: m.dispatch(X, IDX[:, :1].copy()),
        ),
        "expert dtype": (
            "topk_idx has dtype f32: pass i32 or i64",
            lambda m, _: m.dispatch(X, IDX.astype(F32)),
        ),
        "weights": (
            r"topk_weights has shape \(2, 2\): this call takes \(3, 2\)",
            lambda m, _: m.dispatch(X, IDX, weights[:2]),
        ),
        "weight dtype": ("topk_weights has dtype f64", lambda m, _: m.dispatch(X, IDX, weights.astype("f8"))),
        "out": (
            r"out has shape \(3, 8\): this call takes \(8, 8\)",
            lambda m, _: m.dispatch(X, IDX, out=X.copy()),
        ),
        "out dtype": ("out has dtype f32: pass u8", lambda m, _: m.dispatch(X.view(np.uint8), IDX, out=X)),
        "payload": (
            r"payload 1 has shape \(2,\): its first axis is the tokens of x, 3",
            lambda m, _: m.dispatch((X, np.zeros(2, F32)), IDX),
        ),
        "payload width": (
            "payloads have 8 bytes a token, but more_bytes is 4",
            lambda m, _: m.dispatch((X, np.zeros((3, 2), F32)), IDX),
        ),
        "stream": ("stream= is for arrays on a GPU", lambda m, _: m.dispatch(X, IDX, stream=0)),
        "tokens": (
            "there are 5 tokens, but max_tokens is 4",
            lambda m, _: m.dispatch(np.zeros((5, HIDDEN), F32), np.zeros((5, 2), int)),
        ),
        "y": (r"y has shape \(1, 8\): pass a row for each of the \d received rows", combine(y[:1])),
        "y dtype": ("y has dtype i32: pass f32, f16 or bf16", combine(y.astype("i4"))),
        "y width": ("a row of y has 36 bytes", combine(np.zeros((8, 9), F32))),
        "bias": (r"bias has shape \(8,\): this call takes \(3, 8\)", combine(y, bias=y[0])),
        "combine out": ("out has dtype f16, but y has f32", combine(y, out=X.astype("f2"))),
        "combine weights": ("weighs rows with layout=", combine(y, topk_weights=np.ones(8, F32))),
    }


@pytest.mark.parametrize("name", array_calls())
def test_wrong_array(name: str) -> None:
    words, call = array_calls()[name]
    refused(unisono.UsageError, words, call, more_bytes=4)


@pytest.mark.parametrize("expert", [4, -2, 1 << 40])
def test_index_that_is_no_expert(expert: int) -> None:
    idx = IDX.copy()
    idx[1, 1] = expert
    errors = refused(unisono.UsageError, re.escape(str(expert)), lambda moe, _: moe.dispatch(X, idx))
    assert all("token 1" in str(error) for error in errors)


@pytest.mark.parametrize("scales", ["e4m3_128", "mx"])
def test_rows_that_a_layer_with_scales_cannot_quantise(scales: str) -> None:
    def body(comm: unisono.Communicator) -> None:
        moe = make(comm, scales=scales)
        for words, x in {
            "x has dtype u8, but the Moe quantises f32: convert x": X.astype(np.uint8),
            r"x has shape \(3, 7\): this Moe takes \(tokens, 8\)": X[:, :7].copy(),
        }.items():
            with pytest.raises(unisono.UsageError, match=words):
                moe.dispatch(x, IDX)
        assert moe.dispatch(X, IDX).rows_now > 0

    threads.with_threads(2, body)


@pytest.mark.parametrize("what", ["payload", "x"])
def test_widths_that_differ(what: str) -> None:
    """The communicator fails, on every rank alike."""

    def body(comm: unisono.Communicator) -> str:
        moe = make(comm, more_bytes=8)
        rows = np.zeros((3, 1 + comm.rank), F32)
        with pytest.raises(unisono.MismatchError) as caught:
            moe.dispatch(rows if what == "x" else (X, rows), IDX)
        with pytest.raises(unisono.MismatchError):
            comm.barrier()
        return str(caught.value)

    assert len(set(threads.with_threads(2, body))) == 1


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
def test_more_rows_than_the_capacity(layout: str) -> None:
    """Every rank learns how many are needed, also those with room."""
    everything = np.array([[0, 1]] * 3)  # to rank 0
    rows = {"flat": 6, "expert_major": 12}[layout]

    def body(comm: unisono.Communicator) -> None:
        moe = make(comm, layout=layout, capacity=rows - 1)
        for _ in range(2):
            with pytest.raises(unisono.ResourceError, match=f"rank 0 would receive {rows} rows"):
                moe.dispatch(X, everything)
            assert int(moe.dispatch(X, np.where(IDX > 1, -1, IDX)).rows) > 0 or comm.rank > 0
        make(comm, layout=layout, capacity=rows).dispatch(X, everything)

    threads.with_threads(2, body)


def test_wrong_handles() -> None:
    def another(moe: unisono.Moe, _: int) -> None:
        moe.combine(X, other[0])

    other: list[Any] = []
    threads.with_threads(1, lambda comm: other.append(make(comm).dispatch(X, np.minimum(IDX, 1)).handle))
    refused(unisono.UsageError, "the handle is of another moe", another)

    def stale(moe: unisono.Moe, _: int) -> None:
        d = moe.dispatch(X, IDX)
        for _ in range(2):
            moe.dispatch(X, IDX)
        moe.combine(d.x, d.handle)

    refused(unisono.UsageError, "routing 1 is no longer kept.*more handles", stale, handles=2)

    def other_experts(moe: unisono.Moe, _: int) -> None:
        moe.dispatch(X, IDX[::-1].copy(), handle=moe.dispatch(X, IDX).handle)

    refused(unisono.UsageError, "topk_idx differs from the handle's for token 0", other_experts)

    def other_tokens(moe: unisono.Moe, _: int) -> None:
        moe.dispatch(X[:2], handle=moe.dispatch(X, IDX).handle)

    refused(unisono.UsageError, "the routing is of 3 tokens, but x has 2", other_tokens)


def test_calls_in_the_wrong_order() -> None:
    def body(comm: unisono.Communicator) -> None:
        moe = make(comm)

        def refuses(words: str, call: Callable[[], object]) -> None:
            with pytest.raises(unisono.UsageError, match=words):
                call()

        refuses("no dispatch has begun", moe.dispatch_end)
        refuses("no combine has begun", moe.combine_end)
        moe.dispatch_begin(X, IDX)
        refuses("a dispatch has begun: end it", lambda: moe.dispatch_begin(X, IDX))
        refuses("no combine has begun", moe.combine_end)
        d = moe.dispatch_end()
        refuses("no dispatch has begun", moe.dispatch_end)
        moe.combine_begin(d.x, d.handle)
        refuses("a combine has begun: end it", lambda: moe.combine(d.x, d.handle))
        refuses("a combine has begun: end it", lambda: moe.dispatch(X, IDX))
        assert moe.combine_end().shape == X.shape
        works(moe)

    threads.with_threads(2, body)


def test_closed_communicator() -> None:
    """Calls are refused. The arrays stay."""
    with threads.team(1) as comms:
        moe = make(comms[0])
        d = moe.dispatch(X, np.minimum(IDX, 1))
    with pytest.raises(unisono.UsageError, match="the communicator is closed"):
        moe.combine(d.x, d.handle)
    np.testing.assert_array_equal(d.x[: int(d.rows)], X)


@pytest.mark.parametrize("layout", ["flat", "rank_major", "expert_major"])
def test_no_tokens_anywhere(layout: str) -> None:
    def body(comm: unisono.Communicator) -> None:
        moe = make(comm, layout=layout)
        d = moe.dispatch(X[:0], IDX[:0])
        assert int(d.rows) == 0 and not d.counts.any() and not d.source_rows.any()
        assert moe.combine(d.x, d.handle).shape == (0, HIDDEN)
        if layout == "flat":
            works(moe)

    threads.with_threads(3, body)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_rank_that_dies(phase: str) -> None:
    marker = ranks.new_marker()
    outcome = ranks.play(3, "moe_programs:killed_inside", phase, env=marker)
    assert_lost(outcome, victim=1)
    assert_nothing_left(outcome, marker["UNISONO_TEST"])


@pytest.mark.torch
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("when", ["inside", "between"])
def test_rank_that_dies_on_another_node(when: str, phase: str) -> None:
    """Every rank of both nodes names the dead one, as its process or as its node's rank."""
    marker = ranks.new_marker()
    outcome = ranks.play(4, f"moe_programs:killed_{when}", phase, env=marker, nodes=2)
    died = max(one["result"]["died"] or 0 for one in outcome.ranks if one)
    for rank in (0, 2, 3):
        assert outcome.ranks[rank], (rank, str(outcome.ended))
        result = outcome.ranks[rank]["result"]
        error = error_of(result["first"])
        assert error["type"] == "PeerLostError", error
        assert re.search(rf"rank 1 \((process {result['victim']}|node 0)\)", error["text"]), error
        assert result["first"]["at"] - died < NOTICED_S
        assert [error_of(again) for again in result["again"]] == [error, error]
    assert_nothing_left(outcome, marker["UNISONO_TEST"])
