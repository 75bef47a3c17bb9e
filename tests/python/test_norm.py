"""The fused norms from Python: torch tensors, wrong calls, ranks that differ, and ranks that die."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranks
import threads
import unisono
from faults import assert_lost, assert_nothing_left

F32 = np.float32
ROWS, HIDDEN = 5, 24
X = np.linspace(-2, 3, ROWS * HIDDEN, dtype=F32).reshape(ROWS, HIDDEN)
RESIDUAL = np.cos(X)
WEIGHT = np.linspace(0.5, 2, HIDDEN, dtype=F32)
WHOLE = np.zeros((ROWS + 1, HIDDEN), F32)
Options = unisono.NormOptions
Call = Callable[[unisono.Communicator], Any]


def works(comm: unisono.Communicator) -> None:
    """Checks a call roughly. tests/contract compares every bit."""
    out, residual_out = comm.all_reduce_rms_norm(X, RESIDUAL, WEIGHT)
    rows = X * comm.size + RESIDUAL
    np.testing.assert_allclose(residual_out, rows, rtol=1e-6)
    wanted = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-6) * WEIGHT
    np.testing.assert_allclose(out, wanted, rtol=1e-5)


def test_what_options_tell() -> None:
    told = Options(X, RESIDUAL, "fp8", 0.5, residual="sharded", algorithm="two_shot")
    assert told.out is X and told.residual_out is RESIDUAL and told.scales_out is None
    assert (told.quant, told.scale, told.residual, told.algorithm) == ("fp8", 0.5, "sharded", "two_shot")
    default = Options()
    assert (default.out, default.quant, default.scale, default.algorithm) == (None, None, None, None)
    assert default.residual == "replicated"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quant": "fp4"}, 'no quant "fp4": use fp8, fp8_token, fp8_128 or mx'),
        ({"quant": "none"}, 'no quant "none"'),
        ({"residual": "split"}, 'cannot be "split": use replicated or sharded'),
        ({"algorithm": "ring"}, 'no algorithm "ring": use one_shot, two_shot, apart, one_shot_ll128'),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(unisono.UsageError, match=words):
        Options(**options)


def wrong_calls() -> dict[str, tuple[str, Call]]:
    """Returns calls that cannot be, and the words of the error."""

    def rms(
        x: Any = X, residual: Any = RESIDUAL, weight: Any = WEIGHT, eps: float = 1e-6, **options: Any
    ) -> Call:
        return lambda comm: comm.all_reduce_rms_norm(x, residual, weight, eps, options=Options(**options))

    codes = np.empty((ROWS, HIDDEN), np.uint8)
    return {
        "residual": (r"residual has shape \(4, 24\): this call takes \(5, 24\)", rms(residual=RESIDUAL[:4])),
        "sharded residual": (
            r"residual has shape \(5, 24\): this call takes",
            lambda comm: sharded(comm, RESIDUAL),
        ),
        "residual dtype": (
            "residual has dtype f64, but this call takes f32",
            rms(residual=RESIDUAL.astype("f8")),
        ),
        "weight": (r"weight has shape \(23,\): this call takes \(24,\)", rms(weight=WEIGHT[:-1])),
        "weight dtype": ("weight has dtype f16, but this call takes f32", rms(weight=WEIGHT.astype("f2"))),
        "hidden 0": ("hidden is 0", rms(X[:, :0].copy(), X[:, :0].copy(), WEIGHT[:0])),
        "no axis": ("x has no axis", rms(np.array(1, F32))),
        "integers": (
            "rows of i32 cannot be normalised: give f32, f16 or bf16",
            rms(X.astype("i4"), X.astype("i4"), WEIGHT.astype("i4")),
        ),
        "gaps": ("x is not contiguous", rms(np.zeros((ROWS, 2 * HIDDEN), F32)[:, ::2])),
        "eps": ("eps is -1.0+: give a finite number", rms(eps=-1)),
        "eps nan": ("eps is nan", rms(eps=float("nan"))),
        "out": (r"out has shape \(24, 5\)", rms(out=X.T.copy())),
        "out dtype": ("out has dtype u8, but this call takes f32", rms(out=codes)),
        "codes": ("out has dtype f32, but this call takes f8e4m3", rms(out=X.copy(), quant="mx")),
        "read-only": ("out is read-only", rms(out=np.broadcast_to(X, X.shape))),
        "overlap": ("out overlaps residual_out: give them memory of their own", rms(out=X, residual_out=X)),
        "partial overlap": ("residual_out overlaps x", rms(WHOLE[:ROWS], residual_out=WHOLE[1:])),
        "no scale": ('quant "fp8" needs a scale', rms(quant="fp8")),
        "scale of zero": ("the scale is 0.0+: give a positive finite number", rms(quant="fp8", scale=0.0)),
        "negative scale": ("the scale is -1", rms(quant="fp8", scale=-1.0)),
        "scale too small": ("whose inverse is finite", rms(quant="fp8", scale=1e-40)),
        "scale of mx": ('a scale is for quant "fp8"', rms(quant="mx", scale=1.0)),
        "scales_out": ("scales_out is for quant fp8_token", rms(scales_out=codes)),
        "one_shot": ("one_shot needs the whole residual", lambda comm: sharded(comm, algorithm="one_shot")),
        "stream": ("stream= is for arrays on a GPU", lambda c: c.all_reduce_rms_norm(X, X, WEIGHT, stream=0)),
        "bias": (
            r"bias has shape \(5, 24\): this call takes \(24,\)",
            lambda comm: comm.all_reduce_layer_norm(X, RESIDUAL, WEIGHT, X),
        ),
    }


def sharded(comm: unisono.Communicator, residual: Any = None, **options: Any) -> Any:
    block = -(-ROWS // comm.size)
    own = RESIDUAL[comm.rank * block : (comm.rank + 1) * block] if residual is None else residual
    return comm.all_reduce_rms_norm(X, own, WEIGHT, options=Options(residual="sharded", **options))


@pytest.mark.parametrize("name", wrong_calls())
def test_wrong_call(name: str) -> None:
    """Every rank raises one sentence, and a call works after it."""
    words, call = wrong_calls()[name]

    def body(comm: unisono.Communicator) -> None:
        with pytest.raises(unisono.UsageError, match=words) as caught:
            call(comm)
        text = str(caught.value)
        assert text.endswith(".") and "\n" not in text, text
        works(comm)

    threads.with_threads(2, body)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("what", ["eps", "rows", "quant", "sharded", "kind", "algorithm"])
def test_calls_that_differ(what: str, check: bool) -> None:
    """Every rank gets the same error, and the communicator has failed."""

    def body(comm: unisono.Communicator) -> str:
        odd = comm.rank == 1

        def call() -> None:
            x, residual, options = X, RESIDUAL, Options()
            if odd and what == "rows":
                x, residual = X[:4], RESIDUAL[:4]
            if odd and what == "quant":
                options = Options(quant="mx")
            if odd and what == "algorithm":
                options = Options(algorithm="one_shot")
            if odd and what == "sharded":
                sharded(comm)
            elif odd and what == "kind":
                comm.all_reduce_layer_norm(x, residual, WEIGHT, eps=1e-6)
            else:
                eps = 1e-5 if odd and what == "eps" else 1e-6
                comm.all_reduce_rms_norm(x, residual, WEIGHT, eps, options=options)

        with pytest.raises(unisono.MismatchError) as caught:
            for _ in range(3):  # without check a rank may have done its part of the first
                call()
        with pytest.raises(unisono.MismatchError):
            comm.barrier()
        return str(caught.value)

    texts = set(threads.with_threads(2, body, check=check))
    assert len(texts) == 1
    if check:
        assert "rank 0 called all_reduce_rms_norm of 5 x 24 f32, eps" in texts.pop()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_symmetric_memory(size: int, sharded: bool) -> None:
    """Rows of memory that the ranks share have the bits of plain ones, by calls apart."""

    def body(comm: unisono.Communicator) -> None:
        rows, hidden = 33, 640
        rng = np.random.default_rng(comm.rank)
        plain = rng.standard_normal((rows, hidden)).astype(F32)
        residual = np.cos(np.arange(rows * hidden, dtype=F32).reshape(rows, hidden))
        weight = np.linspace(0.5, 2, hidden, dtype=F32)
        held = residual
        if sharded:
            block = -(-rows // comm.size)
            held = residual[comm.rank * block : (comm.rank + 1) * block].copy()
        kind = "sharded" if sharded else "replicated"
        wanted = comm.all_reduce_rms_norm(
            plain, held, weight, options=Options(residual=kind, algorithm="apart")
        )
        x, out, residual_out = (comm.empty((rows, hidden), F32) for _ in range(3))
        x[:] = plain
        options = Options(out=out, residual_out=residual_out[: len(held)], residual=kind)
        for _ in range(3):
            got = comm.all_reduce_rms_norm(x, held, weight, options=options)
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(one, other)

    threads.with_threads(size, body)


def test_closed_communicator() -> None:
    with threads.team(1) as comms:
        works(comms[0])
    with pytest.raises(unisono.UsageError, match="the communicator is closed"):
        works(comms[0])


@pytest.mark.torch
@pytest.mark.parametrize("quant", [None, "fp8", "fp8_token", "fp8_128", "mx"])
def test_torch_tensors(quant: str | None) -> None:
    """New arrays are tensors. They have the bits of numpy's."""
    import torch

    scale = 0.02 if quant == "fp8" else None

    def body(comm: unisono.Communicator) -> None:
        options = Options(quant=quant, scale=scale)
        x, residual, weight = (torch.from_numpy(one) for one in (X, RESIDUAL, WEIGHT))
        first, residual_out = comm.all_reduce_rms_norm(x, residual, weight, options=options)
        wanted, wanted_residual = comm.all_reduce_rms_norm(X, RESIDUAL, WEIGHT, options=options)
        assert torch.equal(residual_out, torch.from_numpy(wanted_residual))
        if quant is None:
            assert torch.equal(first, torch.from_numpy(wanted))
            return
        codes, scales = first
        assert codes.dtype == torch.float8_e4m3fn
        np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), wanted[0].view(np.uint8))
        if quant == "fp8":
            assert scales == scale
        else:
            np.testing.assert_array_equal(scales.numpy(), wanted[1])

    threads.with_threads(2, body)


@pytest.mark.torch
def test_torch_agrees_with_its_own_norms() -> None:
    import torch

    def body(comm: unisono.Communicator) -> None:
        x, residual, weight = (torch.from_numpy(one) for one in (X, RESIDUAL, WEIGHT))
        rows = comm.all_reduce(x) + residual
        out, residual_out = comm.all_reduce_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(residual_out, rows)
        torch.testing.assert_close(out, torch.nn.functional.rms_norm(rows, (HIDDEN,), weight, 1e-5))
        out, _ = comm.all_reduce_layer_norm(x, residual, weight, weight, 1e-5)
        torch.testing.assert_close(out, torch.nn.functional.layer_norm(rows, (HIDDEN,), weight, weight, 1e-5))

    threads.with_threads(3, body)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "apart", "symmetric"])
def test_rank_that_dies(algorithm: str) -> None:
    marker = ranks.new_marker()
    outcome = ranks.play(3, "norm_programs:killed_inside", algorithm, env=marker)
    assert_lost(outcome, victim=1)
    assert_nothing_left(outcome, marker["UNISONO_TEST"])
