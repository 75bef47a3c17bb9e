"""Workloads: real models as lists of collective calls, read from workloads.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.resources import files
from math import prod

import msgspec

from unisono.bench import matmul, moe
from unisono.bench.cases import CaseError, make_case
from unisono.records import Case, Workload, WorkloadStep
from unisono.records.vocabulary import DEVICES, DTYPES


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mixture of experts; `tokens` are those of each rank."""

    tokens: int
    hidden: int
    experts: int
    top_k: int


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of call. `elements`: factors of the number of elements of the larger buffer on one rank;
    none for a mixture of experts, which has `moe`, and for a matmul, whose m, k and n of all ranks are in
    `matmul`."""

    collective: str
    dtype: str
    calls: float
    elements: list[int] = []
    op: str | None = None
    moe: Experts | None = None
    matmul: tuple[int, int, int] | None = None


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    steps: list[Step]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [[workload]] of the file. Each variant becomes a workload of its own, `name-variant`. Other devices
    than `devices` take long, and measure it only if it is named."""

    name: str
    title: str
    unit: str
    units_per_step: int
    source: str
    variants: list[Variant]
    devices: tuple[str, ...] = DEVICES


class _File(msgspec.Struct, forbid_unknown_fields=True):
    workload: list[Entry]


def entries() -> dict[str, Entry]:
    """Returns all entries of the file, by name."""
    text = files("unisono.bench").joinpath("workloads.toml").read_text(encoding="utf-8")
    return {entry.name: entry for entry in msgspec.convert(tomllib.loads(text), _File).workload}


def split_workloads(text: str, device: str = "cpu") -> list[str]:
    """Returns the names in `"a,b"`, `"all"` or `"none"`: of entries or single variants. All are those that
    suit the device. Raises CaseError."""
    known = entries()
    if text.strip() in ("", "none"):
        return []
    if text.strip() == "all":
        return [name for name, entry in known.items() if device in entry.devices]
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        variants = [_name(entry, variant) for entry in known.values() for variant in entry.variants]
        if name not in known and name not in variants:
            raise CaseError(f"unknown workload {name!r}: choose from {', '.join(known)}.")
    return names


def collectives(names: Iterable[str]) -> set[str]:
    """Returns what the workloads of these names call."""
    return {step.collective for workload, _ in select(names, 1) for step in workload.steps}


def _name(entry: Entry, variant: Variant) -> str:
    return f"{entry.name}-{variant.name}" if variant.name else entry.name


def _case(step: Step, ranks: int, device: str) -> Case:
    mode = "graph" if device == "cuda" else "latency"
    if step.moe is not None:
        m = step.moe  # as many experts on each rank, at least one
        experts = max(1, m.experts // ranks) * ranks
        shape = m.tokens, m.hidden, experts, m.top_k, step.dtype
        return moe.case(step.collective, ranks, *shape, mode=mode, device=device)
    if step.matmul is not None:
        rows, depth, columns = step.matmul
        whole = matmul.Weights(step.collective == matmul.GATHER, depth, columns)
        return matmul.case(
            step.collective, ranks, rows, *matmul.divided(whole, ranks), step.dtype, mode, device
        )
    size = prod(step.elements) * DTYPES[step.dtype].itemsize
    return make_case(step.collective, size, step.dtype, ranks, step.op, mode=mode, device=device)


def select(names: Iterable[str], ranks: int, device: str = "cpu") -> list[tuple[Workload, list[Case]]]:
    """Returns the workloads of these names (an entry means all its variants) with their cases.

    Cases are in plain memory, out of place, in the mode latency, on GPUs graph. Sizes that `ranks` does not
    divide are rounded down to whole blocks, experts to as many on each rank."""
    chosen = []
    for entry in entries().values():
        for variant in entry.variants:
            if entry.name not in names and _name(entry, variant) not in names:
                continue
            cases = [_case(step, ranks, device) for step in variant.steps]
            steps = [
                WorkloadStep(
                    collective=case.collective,
                    bytes=case.bytes,
                    dtype=case.dtype,
                    op=case.op,
                    calls=step.calls,
                    moe=case.moe,
                    matmul=case.matmul,
                )
                for step, case in zip(variant.steps, cases, strict=True)
            ]
            title = f"{entry.title} ({variant.name})" if variant.name else entry.title
            workload = Workload(
                name=_name(entry, variant),
                title=title,
                unit=entry.unit,
                units_per_step=entry.units_per_step,
                source=entry.source,
                steps=steps,
            )
            chosen.append((workload, list(dict.fromkeys(cases))))
    return chosen
