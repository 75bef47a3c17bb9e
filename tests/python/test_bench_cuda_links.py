"""The measurements of `unisono links`, as far as they can be tested without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from unisono import records
from unisono.bench.cuda import links
from unisono.cli import output


def test_the_transfers_of_a_pattern() -> None:
    bench = links.Links.__new__(links.Links)
    bench.devices, bench.size = [0, 1, 2, 3], 3 * links.UNIT
    assert bench.transfers("pair", (2, 0)) == [(2, 0, bench.size)]
    assert bench.transfers("ring") == [
        (0, 1, bench.size),
        (1, 2, bench.size),
        (2, 3, bench.size),
        (3, 0, bench.size),
    ]
    every = bench.transfers("all_pairs")
    assert len(every) == 12
    assert {move[2] for move in every} == {links.UNIT}
    for first in range(0, 12, 4):  # at any moment each GPU receives from one other
        assert len({move[1] for move in every[first : first + 4]}) == 4


def test_the_ceiling_is_the_fastest_ring() -> None:
    def ring(engine: str, gbps: float) -> records.Link:
        return records.Link(
            engine=engine,
            pattern="ring",
            devices=2,
            bytes=1 << 20,
            gbps=gbps,
            samples=[gbps - 1, gbps, gbps + 1],
        )

    best = links.ceiling_of([ring("sm_store", 360.0), ring("copy_engine", 390.0), ring("sm_load", 335.0)])
    assert best is not None
    assert (best.name, best.gbps, best.samples_gbps) == ("ring", 390.0, [389.0, 390.0, 391.0])
    assert links.ceiling_of([]) is None


@pytest.mark.parametrize(("oldest", "bulk"), [((9, 0), True), ((8, 0), False)])
def test_bulk_copies_are_measured_where_every_gpu_has_them(oldest: tuple[int, int], bulk: bool) -> None:
    bench = links.Links.__new__(links.Links)
    capability = [(10, 0), oldest].__getitem__
    bench._torch = SimpleNamespace(cuda=SimpleNamespace(get_device_capability=capability))
    bench.devices, bench._kernels = [0, 1], object()
    assert (links.BULK_STORE in bench.engines) is bulk
    assert bench.engines[:3] == (links.COPY_ENGINE, links.SM_LOAD, links.SM_STORE)


def test_rings_count_also_where_a_later_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = records.Link(engine="sm_store", pattern="ring", devices=2, bytes=8, gbps=360.0, samples=[360.0])
    line = msgspec.json.encode(ring).decode()
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\necho '{line}'\nprintf '{{\"engine\"'\nexit 1\n")
    child.chmod(0o755)
    monkeypatch.setattr(links.sys, "executable", str(child))
    measured, ceiling = links.elsewhere(2)
    assert measured == ring
    assert isinstance(ceiling, records.Ceiling) and ceiling.gbps == 360.0


def test_a_directory_for_links_has_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert output.directory_of(None, "links").name.startswith("unisono-links-")
    assert os.listdir(tmp_path) == []
