"""report.html, report.md and the plots: what they hold, for every shape of records, and that nothing in a
record is code."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt

import report_data as data
from unisono import report
from unisono.bench import cases
from unisono.records import Ceiling, Skip, Workload, WorkloadStep
from unisono.report import html, markdown, model

MARKDOWN_TAGS = set("h1 h2 h3 p strong ul li table thead tbody tr th td details summary pre code".split())
HOSTILE = "</script><script>alert(1)</script>"


class Page(HTMLParser):
    """The elements of a page: start tags with attributes, and the text of scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, dict[str, str | None], str]] = []
        self.text = ""
        self._inside: str | None = None
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, content: str) -> None:
        if self._inside is None:
            self.text += content
        else:
            self.blocks.append((self._inside, self.tags[-1][1], content))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of a whole run, by file name."""
    directory = tmp_path_factory.mktemp("whole")
    workload = Workload(
        name="llama",
        title="Llama, decode",
        unit="layer",
        units_per_step=80,
        source="a paper",
        steps=[WorkloadStep(collective="all_reduce", bytes=65536, dtype="f32", op="sum", calls=2.0)],
    )
    parts = [data.timed(name, data.case(), workload="llama") for name in ("unisono", "mpi")]
    skip = Skip(backend="nccl", reason="no GPU here")
    data.write(directory, data.run(), workload, data.sweep(), parts, skip, data.failure("gloo"), data.end())
    return {path.name: path for path in report.build(directory)}


def _render(directory: Path, *found: object) -> tuple[Page, str]:
    """The page and the Markdown, without the plots, which take long."""
    loaded = model.load(data.write(directory, *found))  # type: ignore[arg-type]
    return Page(html.render(loaded)), markdown.render(loaded, [])


def test_all_files_are_there(built: dict[str, Path]) -> None:
    each = ("bandwidth", "time", "spread", "stability", "sol", "distribution")
    by_mode = [f"{name}_{mode}" for mode in ("latency", "throughput") for name in each]
    plots = ["speedup_heatmap", *by_mode, "workloads"]
    assert list(built) == ["report.html", "report.md", *(f"{name}.png" for name in plots)]
    for name in plots:
        content = built[f"{name}.png"].read_bytes()
        assert content.startswith(b"\x89PNG")
        assert _width_of(content) >= 600
        assert f"]({name}.png)" in built["report.md"].read_text()


def _width_of(png: bytes) -> int:
    """Also checks every chunk's sum and that the pixels can be unpacked."""
    position, pixels = 8, b""
    while position < len(png):
        length = int.from_bytes(png[position : position + 4])
        chunk = png[position + 4 : position + 8 + length]
        assert zlib.crc32(chunk) == int.from_bytes(png[position + 8 + length : position + 12 + length])
        if chunk[:4] == b"IDAT":
            pixels += chunk[4:]
        position += 12 + length
    width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    assert len(zlib.decompress(pixels)) == height * (width * 4 + 1)
    return width


def test_the_page_says_what_matters(built: dict[str, Path]) -> None:
    page = Page(built["report.html"].read_text())
    text = " ".join(page.text.split())
    for words in (
        "3 backends (unisono, gloo and mpi) ran 3 collectives of 8 B to 256 KiB on 2 ranks of Test CPU",
        "geometric mean speed-up of unisono over the best peer of each case",
        "1 case failed",
        "element 3 is wrong",
        "no GPU here",
        "unisono bench --ranks 2 -O 'my results'",
        "OMP_NUM_THREADS=1",
        "2(n-1)/n",
        "Per layer",
        "80 layers",
    ):
        assert words in text
    sections = [a["id"] for tag, a in page.tags if tag in ("header", "section") and "id" in a]
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert links == [f"#{name}" for name in sections]
    assert sections[:3] == ["summary", "speedup", "bandwidth"]


def test_the_page_is_self_contained_and_its_policy_names_its_own_blocks(built: dict[str, Path]) -> None:
    source = built["report.html"].read_text()
    assert built["report.html"].stat().st_size < 6e6
    page = Page(source)
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object", "base", "form")]
    assert not [a for _, a in page.tags if "src" in a or "style" in a or any(k.startswith("on") for k in a)]
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a) or ""
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    blocks = [(t, content) for t, a, content in page.blocks if a.get("type") != "application/json"]
    assert [tag for tag, _ in blocks] == ["style", "script", "script"]
    for _, content in blocks:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert len(re.findall("sha256-", policy)) == 3


def test_the_data_block_is_what_the_charts_need(built: dict[str, Path]) -> None:
    page = Page(built["report.html"].read_text())
    ((_, _, raw),) = [block for block in page.blocks if block[1].get("type") == "application/json"]
    found = json.loads(raw)
    assert found["backends"] == ["unisono", "gloo", "mpi"]
    assert len(found["results"]["rows"]) == len(data.sweep()) + 2
    assert len(found["samples"]) == len(found["results"]["rows"])
    (bars,) = found["fixed"]
    assert len(bars["rows"]) == 3  # unisono, mpi and the best of each


def test_markdown_has_the_same_content(built: dict[str, Path]) -> None:
    text = built["report.md"].read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[:3] == ["Summary", "Speed-up", "Bandwidth"]
    assert headings[-3:] == ["Failures and skips", "Method", "Provenance"]
    assert "| Median | 95 % interval | Minimum | Maximum |" in text
    assert "p95 –, p99 –" in text  # noqa: RUF001  (60 samples carry neither)
    assert "p95 needs 72, p99 368" in text
    for words in (
        "1 case failed",
        "element 3 is wrong",
        "no GPU here",
        "unisono bench --ranks 2 -O 'my results'",
    ):
        assert words in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


def test_building_again_gives_the_same_markdown(built: dict[str, Path], tmp_path: Path) -> None:
    first = built["report.md"].read_bytes()
    again = {path.name: path for path in report.build(built["report.md"].parent, tmp_path / "again")}
    assert again["report.md"].read_bytes() == first
    assert again["report.html"].read_bytes() == built["report.html"].read_bytes()


@pytest.mark.parametrize(
    "place", ["backend", "collective", "op", "message", "command", "machine", "workload"]
)
def test_nothing_in_a_record_becomes_code(tmp_path: Path, place: str) -> None:
    head = data.run(command=[HOSTILE]) if place == "command" else data.run()
    if place == "machine":
        head.machine.cpu = HOSTILE
    results = [
        data.timed("unisono", data.case()),
        data.timed(HOSTILE if place == "backend" else "mpi", data.case()),
    ]
    for result in results:
        if place in ("collective", "op"):
            result.case = msgspec.structs.replace(result.case, **{place: HOSTILE})
        result.workload = HOSTILE if place == "workload" else None
    step = WorkloadStep(collective="all_reduce", bytes=65536, dtype="f32", op="sum", calls=1.0)
    workload = Workload(
        name=HOSTILE, title=HOSTILE, unit=HOSTILE, units_per_step=2, source=HOSTILE, steps=[step]
    )
    failed = data.failure(message=HOSTILE) if place == "message" else data.failure()
    page, text = _render(
        tmp_path, head, [workload] if place == "workload" else [], results, failed, data.end()
    )
    assert [tag for tag, _ in page.tags].count("script") == 3
    twin = Page(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    assert {tag for tag, _ in twin.tags} <= MARKDOWN_TAGS
    if place != "op":  # which only the charts and tables of the page show
        assert "alert(1)" in page.text
    assert "alert(1)" in twin.text


def test_json_for_a_script_cannot_end_it() -> None:
    raw = html.script_json({"a": "</script><!-- & \u2028"})
    assert not set("<>&\u2028") & set(raw)
    assert json.loads(raw) == {"a": "</script><!-- & \u2028"}


@pytest.mark.parametrize(
    "backends", [["unisono"], ["mpi"], ["gloo", "mpi"], ["unisono", "unisono:two_shot"]], ids="+".join
)
def test_any_set_of_backends(tmp_path: Path, backends: list[str]) -> None:
    page, text = _render(tmp_path, data.run(), data.sweep(backends), data.end())
    compared = backends == ["gloo", "mpi"]
    assert ("There is nothing to compare" in page.text) is not compared
    assert ("geometric mean speed-up of gloo" in page.text) is compared
    assert ("There is nothing to compare" in text) is not compared


def test_plots_of_runs_that_share_no_selection(tmp_path: Path) -> None:
    """Plain memory in one mode, symmetric memory in the other: no row has the usual value of both."""
    plain = [
        data.timed("unisono", what) for what in cases.grid(2, ["all_reduce"], [64, 512], modes=["latency"])
    ]
    other = cases.grid(2, ["all_reduce"], [64], modes=["throughput"], memories=["symmetric"])
    data.write(tmp_path, data.run(), plain, [data.timed("unisono", what) for what in other], data.end())
    assert any(path.suffix == ".png" for path in report.build(tmp_path))


def test_plots_of_one_backend(tmp_path: Path) -> None:
    data.write(tmp_path, data.run(), data.sweep(["mpi"], ["all_reduce"], [8], modes=["latency"]), data.end())
    names = {path.name for path in report.build(tmp_path)}
    assert "speedup_heatmap.png" not in names
    assert {"bandwidth.png", "time.png", "report.html"} <= names


def test_a_run_of_barriers_only(tmp_path: Path) -> None:
    data.write(tmp_path, data.run(), data.sweep(collectives=["barrier"]), data.end())
    names = {path.name for path in report.build(tmp_path)}
    assert "speedup_heatmap.png" in names
    assert not any(name.startswith("bandwidth") for name in names)


def test_without_results_the_report_still_says_why(tmp_path: Path) -> None:
    page, text = _render(tmp_path, data.run(), data.failure(), data.end())
    for words in (page.text, text):
        assert "The records hold no result" in words
        assert "element 3 is wrong" in words
    assert {path.name for path in report.build(tmp_path)} == {"report.html", "report.md"}


def test_a_cut_run_says_so_first(tmp_path: Path) -> None:
    directory = data.write(tmp_path, data.run(), data.sweep(["unisono"]))
    file = directory / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    loaded = model.load(directory)
    for words in (Page(html.render(loaded)).text, markdown.render(loaded, []).replace("\\", "")):
        assert "records.jsonl was cut short" in words
        assert "the file ends in the middle of it" in words
        assert words.index("was cut short") < words.index("There is nothing to compare")


CROWDED = "8 ranks shared 2 cores: libraries that busy-wait, as MPICH does, are slowed by that"


@pytest.mark.parametrize(
    ("ranks", "run", "case", "warned"),
    [
        (8, {}, {}, True),
        (2, {}, {}, False),
        (8, {"launcher": "slurm", "nodes": [0, 1, 2, 3] * 2}, {}, False),
        (8, {"launcher": "unisono", "nodes": [0, 1, 2, 3] * 2}, {}, True),
        (8, {}, {"device": "cuda", "mode": "graph"}, False),
        (8, {}, {"collective": "pingpong", "pattern": "one_way", "pair": (0, 1), "op": None}, False),
    ],
    ids=["crowded", "a core each", "four machines", "virtual nodes", "GPUs", "a pair alone"],
)
def test_more_ranks_than_cores_are_said(
    tmp_path: Path, ranks: int, run: dict[str, object], case: dict[str, object], warned: bool
) -> None:
    results = [data.timed(name, data.case(ranks=ranks, **case)) for name in ("unisono", "mpi")]
    page, text = _render(tmp_path, data.run(ranks, **run), results, data.end())
    assert (CROWDED in page.text, CROWDED in text) == (warned, warned)
    if warned:
        assert text.index(CROWDED) < text.index("geometric mean")


def test_the_headline_says_how_many_cases_are_judged(tmp_path: Path) -> None:
    """Of 512 B too: mpi, the best, was visited too rarely, but gloo is faster for sure."""
    few, many = {"visits": [20] * 3}, {"visits": [10] * 6}
    sizes = (8, 64, 512)
    results = [data.timed("unisono", data.case(size=size), 4.0, **many) for size in sizes]
    results += [
        data.timed("mpi", data.case(size=8), 8.0, **many),
        data.timed("mpi", data.case(size=64), 8.0, **few),
        data.timed("mpi", data.case(size=512), 1.0, **few),
        data.timed("gloo", data.case(size=512), 2.0, **many),
    ]
    for words in _render(tmp_path, data.run(), results, data.end()):
        said = words.text if isinstance(words, Page) else words
        assert "3 cases, 2 of them judged, 2 ranks" in said


def test_no_text_of_the_reports_own_has_code_in_it(built: dict[str, Path]) -> None:
    """It would stand there with its backquotes."""
    assert "\\`" not in built["report.md"].read_text()
    assert "`" not in Page(built["report.html"].read_text()).text


def test_several_rank_counts_in_one_report(tmp_path: Path) -> None:
    for ranks in (2, 4):
        data.write(
            tmp_path / str(ranks), data.run(ranks), data.sweep(ranks=ranks, modes=["latency"]), data.end()
        )
    found = report.build(tmp_path)
    assert {"bandwidth_2_ranks.png", "bandwidth_4_ranks.png"} <= {path.name for path in found}
    page = Page(found[0].read_text())
    assert "36 cases" not in page.text
    assert len(re.findall("geometric mean speed-up of", page.text)) == 2
    ((_, _, raw),) = [block for block in page.blocks if block[1].get("type") == "application/json"]
    ranks_dimension = next(d for d in json.loads(raw)["dimensions"] if d["name"] == "ranks")
    assert ranks_dimension["values"] == [2, 4]


def test_each_ceiling_says_which_it_is(tmp_path: Path) -> None:
    for ranks in (2, 4):
        both = [Ceiling(name="copy", bytes=1 << 25, gbps=gbps, samples_gbps=[gbps]) for gbps in (9.0, 8.0)]
        result = data.timed("unisono", data.case(ranks=ranks))
        data.write(tmp_path / str(ranks), data.run(ranks), both[0], result, both[1], data.end())
    _, text = _render(tmp_path, data.run(1), data.end())
    assert "| copy | 2/records.jsonl | 2 | start | 32 MiB | 9.00 | 9.00 to 9.00 |" in text
    assert "| copy | 4/records.jsonl | 4 | end | 32 MiB | 8.00 | 8.00 to 8.00 |" in text


def test_gpu_modes(tmp_path: Path) -> None:
    results = [
        data.timed(name, data.case(mode=mode)) for name in ("unisono", "nccl") for mode in ("graph", "events")
    ]
    page, text = _render(tmp_path, data.run(), results, data.end())
    assert "2 cases, 2 ranks" in page.text
    assert "2 ranks, graph, plain" in text


def test_a_large_run_stays_small(tmp_path: Path) -> None:
    sizes = [8 << i for i in range(26)]
    results = data.sweep(
        ["unisono", "mpi", "gloo"], ["all_reduce", "all_gather", "reduce", "all_to_all"], sizes, count=400
    )
    loaded = model.load(data.write(tmp_path, data.run(), results * 2, data.end()))
    assert len(html.render(loaded).encode()) < 6e6
