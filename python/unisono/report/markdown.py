"""Renders blocks as Markdown, and report.md, the page's twin for a repository, an issue or a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.records import text

from . import blocks as b
from .model import Model
from .sections import sections

_md = text.markdown


def render(model: Model, images: Sequence[str]) -> str:
    """Returns the report; `images` are the names of the plots beside it. Equal records give equal bytes."""
    lines = []
    for section in sections(model):
        if found := rendered(section.blocks, images):
            lines += [f"## {section.title}", "", *found]
    return _document("Unisono bench report", lines)


def document(title: str, blocks: Iterable[b.Block]) -> str:
    """Returns blocks below a title."""
    return _document(title, rendered(blocks))


def _document(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"# {title}", "", *lines]).rstrip() + "\n"


def rendered(blocks: Iterable[b.Block], images: Sequence[str] = ()) -> list[str]:
    """Returns the lines of these blocks; everything from a record is escaped."""
    return [line for block in blocks for line in _block(block, images)]


def _block(block: b.Block, images: Sequence[str]) -> list[str]:
    match block:
        case b.Text(words, style):
            lines = code(words) if style == "code" else [_md(words)]
            return [f"### {lines[0]}" if style == "heading" else line for line in lines] + [""]
        case b.Items(title, items):
            heading = [f"**{_md(title)}**", ""] if title else []
            return [*heading, *(f"- {_md(item)}" for item in items), ""] if items else []
        case b.Terms(terms):
            return [*(f"- **{_md(term)}**: {_md(words)}" for term, words in terms), ""]
        case b.Headline(figure, meaning, verdicts, remarks):
            counts = ", ".join(f"{verdicts.counts[verdict]} {verdict}" for verdict in b.VERDICTS)
            return [f"**{_md(figure)}** {_md(meaning)} {counts}. {_md(remarks)}", ""]
        case b.Table(head, rows, numeric, title=title):
            rule = ("---:" if i in numeric else "---" for i in range(len(head)))
            heading = [f"### {_md(title)}", ""] if title else []
            return [*heading, _line(head), f"| {' | '.join(rule)} |", *map(_line, rows), ""]
        case b.Chart(picture=stem):
            names = [image.removesuffix(".png") for image in images]
            mine = (name for name in names if stem and (name == stem or name.startswith(f"{stem}_")))
            return [line for name in mine for line in (f"![{name.replace('_', ' ')}]({name}.png)", "")]
        case b.Part(inner, title, only) if only != "page":
            lines = rendered(inner, images)
            fold = [f"<details><summary>{_md(title)}</summary>", "", *lines, "</details>", ""]
            return fold if title else lines
    return []


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(_md(cell) for cell in cells)} |"


def code(content: str) -> list[str]:
    """Returns a code block that no content can end early."""
    fence = "```"
    while fence in content:
        fence += "`"
    return [fence, content, fence]
