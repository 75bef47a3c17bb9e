"""report.html in a real browser: the charts are drawn, the controls work, nothing is logged, nothing is
loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import chromium
import report_data as data
from unisono.report import html, model

EXECUTABLE = chromium.find()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        EXECUTABLE is None, reason="no Chromium on PATH (Debian's package is called chromium)"
    ),
]
CHARTS = {
    "heat": 2,
    "bandwidth-panels": 2,
    "latency-panels": 2,
    "samples": 1,
    "cv": 1,
    "spread-panels": 3,
    "sol-grid": 1,
}
# The number of marks in each chart of a section.
MARKS = """name => [...document.querySelectorAll(`#${name} svg.marks`)].map(
    svg => svg.querySelectorAll(".role-mark path, .role-mark text, .role-mark line").length)"""
# Chooses the option at `index` of a select.
CHOOSE = """(selector, which, index) => {
    const select = document.querySelectorAll(selector)[which];
    select.selectedIndex = index;
    select.onchange();
}"""
# Scrolls to the first point of a curve and returns its middle.
POINT = """(() => {
    const point = document.querySelector("#bandwidth-panels .mark-symbol path");
    point.scrollIntoView({ block: "center", behavior: "instant" });
    const box = point.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
})()"""
INTRUDE = """(() => {
    const script = document.createElement("script");
    script.textContent = "window.broken = 1";
    const image = document.createElement("img");
    image.src = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
    document.body.append(script, image);
})()"""
SEARCH = """words => {
    const input = document.querySelector("#result-table input");
    input.value = words;
    input.oninput();
}"""
HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    assert EXECUTABLE is not None
    with chromium.Browser(EXECUTABLE, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two numbers of ranks."""
    directory = tmp_path_factory.mktemp("report")
    for ranks in (2, 4):
        data.write(directory / str(ranks), data.run(ranks), data.sweep(ranks=ranks), data.end())
    return _write(directory)


@pytest.fixture
def page(browser: chromium.Browser, written: Path) -> chromium.Browser:
    """That report, just opened."""
    return _open(browser, written)


def _write(directory: Path) -> Path:
    file = directory / "report.html"
    file.write_text(html.render(model.load(directory)), encoding="utf-8")
    return file


def _open(browser: chromium.Browser, file: Path, width: int = 1440) -> chromium.Browser:
    browser.messages.clear()
    browser.media()
    browser.open(file, width)
    return browser


def _quiet(browser: chromium.Browser) -> None:
    assert browser.complaints() == []
    assert browser.evaluate("document.querySelectorAll('#script-errors li').length") == 0
    assert [url.split(":")[0] for url in browser.requests()] == ["file"]


def test_every_chart_is_drawn_and_nothing_is_logged_or_loaded(page: chromium.Browser) -> None:
    for name, charts in CHARTS.items():
        found = page.evaluate(f"({MARKS})({name!r})")
        assert len(found) == charts, name
        assert all(marks > 2 for marks in found), name
    rows = page.evaluate("document.querySelectorAll('#result-table tbody tr').length")
    assert rows == 2 * len(data.sweep())
    _quiet(page)


def test_curves_of_a_scaling_and_matrices_of_pairs(browser: chromium.Browser, tmp_path: Path) -> None:
    both = [data.scaled(kind, {1: 10.0, 2: 20.0, 4: 25.0}) for kind in ("weak", "strong")]
    data.write(tmp_path, data.run(4), data.pingpongs(4, (1, 3)), *both, data.end())
    page = _open(browser, _write(tmp_path))
    charts = page.evaluate(
        "document.querySelectorAll('#efficiency-weak svg.marks, #efficiency-strong svg.marks').length"
    )
    assert charts == 2
    points = page.evaluate("document.querySelectorAll('#scaling .mark-symbol path').length")
    assert points == 2 * 3
    cells = page.evaluate("document.querySelectorAll('#pairs .pairs td').length")
    assert cells == 6 * 16
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    _quiet(page)


def test_pictures_in_light_dark_and_on_paper(page: chromium.Browser, tmp_path: Path) -> None:
    shots, backgrounds = [], []
    for scheme in ("light", "dark"):
        page.media(scheme=scheme)
        shots.append(page.screenshot(tmp_path / f"{scheme}.png"))
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert all(shot.startswith(b"\x89PNG") and len(shot) > 50_000 for shot in shots)
    assert shots[0] != shots[1]
    assert backgrounds == ["rgb(247, 247, 245)", "rgb(15, 18, 22)"]
    page.media("print", "dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(26, 30, 35)"
    _quiet(page)


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_nothing_sticks_out(browser: chromium.Browser, written: Path, width: int) -> None:
    page = _open(browser, written, width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_another_selection_redraws_the_charts(page: chromium.Browser) -> None:
    labels = page.evaluate("[...document.querySelectorAll('#selects label')].map(l => l.firstChild.data)")
    assert labels == ["Ranks", "Mode"]
    before = page.evaluate("document.querySelector('#heat').textContent")
    rows = page.evaluate("document.querySelector('#percentile-table tbody').textContent")
    page.evaluate(f"({CHOOSE})('#selects select', 0, 1)")
    page.wait(f"document.querySelectorAll('#heat svg.marks').length === {CHARTS['heat']}")
    page.wait(f"document.querySelector('#heat').textContent !== {before!r}")
    assert page.evaluate("document.querySelector('#percentile-table tbody').textContent") != rows
    page.wait("document.querySelectorAll('#latency-panels svg.marks').length === 2")
    _quiet(page)


def test_another_case_redraws_the_distribution(page: chromium.Browser) -> None:
    axis = "document.querySelector('#samples svg.marks')?.textContent"
    before = page.evaluate(axis)
    page.evaluate(f"({CHOOSE})('#pick select', 1, 2)")
    page.wait(f"{axis} && {axis} !== {before!r}")
    chosen = page.evaluate("document.querySelectorAll('#pick select')[1].value")
    assert chosen == "256 KiB"
    _quiet(page)


def test_the_boxes_stand_over_the_axis_of_the_curves(page: chromium.Browser) -> None:
    areas = page.evaluate(
        "[0, 1].map(i => document.querySelector(`#samples .concat_${i}_group path.background`))"
        ".map(path => path.getBoundingClientRect()).map(box => [box.left, box.right])"
    )
    assert areas[0] == pytest.approx(areas[1], abs=1)


def test_the_table_sorts_and_filters(page: chromium.Browser) -> None:
    rows = "[...document.querySelectorAll('#result-table tbody tr')].map(r => [...r.cells].map(c => c.innerText))"  # noqa: E501
    heads = page.evaluate("[...document.querySelectorAll('#result-table th')].map(h => h.textContent)")
    size = heads.index("Size")
    press = f"document.querySelectorAll('#result-table th button')[{size}].click()"
    page.evaluate(press)
    up = [row[size] for row in page.evaluate(rows)]
    page.evaluate(press)
    down = [row[size] for row in page.evaluate(rows)]
    assert (up[0], up[-1], down[0], down[-1]) == ("0 B", "256 KiB", "256 KiB", "0 B")
    page.evaluate(f"({SEARCH})('MPI barrier')")
    kept = page.evaluate(rows)
    assert len(kept) == 4
    assert {row[heads.index("Backend")] for row in kept} == {"mpi"}
    assert page.evaluate("document.querySelector('#result-table .table-tools span').textContent") == "4 rows"
    _quiet(page)


def test_names_from_records_are_text(browser: chromium.Browser, tmp_path: Path) -> None:
    backends = ["unisono", HOSTILE, "<img src=x onerror=alert(1)>", "var(--s0)", "a\"b'c\\"]
    data.write(tmp_path, data.run(), data.sweep(backends, ["all_reduce", "reduce"]), data.end())
    page = _open(browser, _write(tmp_path))
    legend = page.evaluate("[...document.querySelectorAll('#legend span')].map(s => s.textContent)")
    assert sorted(legend) == sorted(backends)
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    shown = "document.querySelector('#vg-tooltip-element.visible') !== null"
    deadline = time.monotonic() + 60
    while not page.evaluate(shown):  # the layout may move under the pointer
        assert time.monotonic() < deadline
        box = page.evaluate(POINT)
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        time.sleep(0.1)
    assert "95 % interval" in page.evaluate("document.querySelector('#vg-tooltip-element').textContent")
    _quiet(page)


def test_the_policy_stops_any_other_script_and_any_request(page: chromium.Browser) -> None:
    page.evaluate(INTRUDE)
    page.wait("document.querySelectorAll('#script-errors li').length >= 2")
    assert page.evaluate("document.querySelector('#script-errors').checkVisibility()")
    assert page.evaluate("window.broken === undefined")
    refused = page.evaluate("fetch(location.href).then(() => 'loaded', () => 'refused')")
    assert refused == "refused"


def test_a_report_without_results_opens_quietly(browser: chromium.Browser, tmp_path: Path) -> None:
    data.write(tmp_path, data.run(), data.failure(), data.end())
    page = _open(browser, _write(tmp_path))
    assert "The records hold no result" in page.evaluate("document.body.textContent")
    _quiet(page)


def test_one_backend_opens_quietly(browser: chromium.Browser, tmp_path: Path) -> None:
    data.write(tmp_path, data.run(), data.sweep(["mpi"], ["barrier", "all_reduce"], [8]), data.end())
    page = _open(browser, _write(tmp_path))
    assert "no pair of results to compare" in page.evaluate("document.querySelector('#heat').textContent")
    _quiet(page)
