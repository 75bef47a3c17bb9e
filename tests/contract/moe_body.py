"""The body of a contract run of mixture of experts on one rank: makes layers, calls, compares every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import unisono
from body import Report
from moe_cases import Job, bias, combined_by, jobs, late_weights, outputs, parts, received_by_all, tokens_of
from moe_reference import Field, Tokens
from reference import DTYPES, Array, difference

_ROUNDS = 20


@dataclass
class Run:
    """A job on one rank, with the Moe that it makes."""

    job: Job
    comm: unisono.Communicator
    report: Report

    def __post_init__(self) -> None:
        job, layer = self.job, self.job.layer
        options = unisono.MoeOptions(
            layout=layer.layout,
            alignment=layer.alignment,
            scales=layer.scales,
            capacity=layer.capacity,
            drop=job.drop,
            more_bytes=job.more_bytes,
            handles=4,
        )
        self.rank = self.comm.rank
        self.moe = self.comm.moe(
            layer.experts, layer.top_k, layer.hidden, layer.max_tokens, DTYPES[layer.dtype], options
        )

    def complain(self, text: str) -> None:
        self.report.complain(self.job.group, f"{self.job}: rank {self.rank}, {text}")

    # ---- dispatch ----

    def arguments(self, part: Tokens) -> tuple[Any, ...]:
        x: Any = (part.x, *part.more) if part.more else part.x
        return x, part.topk_idx, part.weights

    def dispatch(self, turn: int, routing: int | None = None, **more: Any) -> Any:
        part = parts(self.job, turn, routing)[self.rank]
        before = part.x.tobytes()
        if self.job.given:
            kind = part.x.dtype if self.job.layer.scales is None else DTYPES["f8e4m3"]
            more["out"] = np.empty((self.moe.rows_held, part.x.shape[1]), kind)
        call = self.in_steps if self.job.group == "steps" else self.at_once
        came = call("dispatch", *self.arguments(part), **more)
        if "out" in more and came.x is not more["out"]:
            self.complain("x is not out")
        if part.x.tobytes() != before:
            self.complain("the dispatch has changed its x")
        self.check(came, turn, routing)
        return came

    def at_once(self, what: str, *arguments: Any, **more: Any) -> Any:
        return getattr(self.moe, what)(*arguments, **more)

    def in_steps(self, what: str, *arguments: Any, **more: Any) -> Any:
        getattr(self.moe, f"{what}_begin")(*arguments, **more)
        np.ones((64, 64)) @ np.ones((64, 64))
        return getattr(self.moe, f"{what}_end")()

    def check(self, came: Any, turn: int, routing: int | None = None) -> None:
        """Compares all that has come."""
        expected = received_by_all(self.job, turn, routing)[self.rank]
        anyone = any(len(part.x) for part in parts(self.job, turn, routing))
        for name, field in expected.fields.items():
            if name == "topk_weights" and not anyone:
                continue  # without a token nobody has a say in whether there are weights
            self.compare(name, getattr(came, name), field)
        if came.rows_now != int(came.rows):
            self.complain(f"rows_now is {came.rows_now}, rows {came.rows}")

    def compare(self, name: str, got: Any, field: Any) -> None:
        if isinstance(field, tuple):
            if len(got) != len(field):
                self.complain(f"{name} has {len(got)} arrays")
            for place, (one, wanted) in enumerate(zip(got, field, strict=False)):
                self.compare(f"{name}[{place}]", one, wanted)
        elif field is None or got is None:
            if field is not got:
                self.complain(f"{name} is {got}, expected {field}")
        else:
            self.compare_field(name, got, field)

    def compare_field(self, name: str, got: Array, field: Field) -> None:
        by_row = name in ("x", "scales", "topk_idx", "topk_weights", "row_expert") or name.startswith("more")
        if by_row and len(got) != self.moe.rows_held:
            return self.complain(f"{name} has {len(got)} rows, not {self.moe.rows_held}")
        part, wanted = np.array(got[field.at], order="C"), field.values
        if (part.dtype, part.shape) != (wanted.dtype, wanted.shape):
            return self.complain(f"{name} is {part.dtype} {part.shape}, not {wanted.dtype} {wanted.shape}")
        if part.tobytes() != wanted.tobytes():  # moved as they are: NaNs too
            at = np.argwhere(
                np.atleast_1d(part).view(np.uint8).ravel() != np.atleast_1d(wanted).view(np.uint8).ravel()
            )
            self.complain(f"{name}: byte {at[0, 0]} differs, and {len(at) - 1} more")
        return None

    # ---- combine ----

    def combine(self, turn: int, handle: Any, routing: int | None = None) -> Array:
        job = self.job
        more: dict[str, Any] = {"bias": bias(job, self.rank, turn)}
        weights = late_weights(job, turn)
        if weights is not None:
            more["topk_weights"] = weights[self.rank]
        if job.given:
            more["out"] = np.empty((tokens_of(job, self.rank), job.width), DTYPES[job.y_dtype])
        call = self.in_steps if job.group == "steps" else self.at_once
        out: Array = call("combine", outputs(job, turn)[self.rank], handle, **more)
        expected = combined_by(job, self.rank, turn, routing)
        if out.shape != expected.shape:
            self.complain(f"combine gives shape {out.shape}, not {expected.shape}")
        elif wrong := difference(out, expected):
            self.complain(f"combine, {wrong}")
        return out

    # ---- programs ----

    def once(self) -> None:
        came = self.dispatch(0)
        self.combine(0, came.handle)

    def handles(self) -> None:
        """Two routings at once, combined in either order, and used again with other data."""
        first, second = self.dispatch(0), self.dispatch(1)
        self.check(first, 0)
        later = self.combine(1, second.handle)
        self.combine(0, first.handle)
        if not np.array_equal(later.view(np.uint8), self.combine(1, second.handle).view(np.uint8)):
            self.complain("a second combine gives other bits")
        part = parts(self.job, 2, 0)[self.rank]
        x, _, weights = self.arguments(part)
        again = self.moe.dispatch(x, None, weights, handle=first.handle)
        self.check(again, 2, 0)
        self.combine(2, again.handle, 0)
        self.dispatch(3, 1, handle=second.handle)  # with the same topk_idx
        self.combine(3, second.handle, 1)

    def rounds(self) -> None:
        for turn in range(_ROUNDS):
            came = self.dispatch(turn % 3)
            self.combine(turn % 3, came.handle)


def run(communicators: Sequence[unisono.Communicator], report: Report) -> None:
    """Runs all jobs on this rank, by turns on its communicators, in the same order as every other rank."""
    comm = communicators[0]
    for job in jobs(comm.size):
        here = communicators[job.number % len(communicators)]
        try:
            one = Run(job, here, report)
            program: Callable[[], None] = {
                "handles": one.handles,
                "rows": one.handles,
                "rounds": one.rounds,
            }.get(job.group, one.once)
            program()
        except Exception as error:
            raise RuntimeError(f"{job} on rank {comm.rank}: {type(error).__name__}: {error}") from error
        report.done[job.group] += 1
