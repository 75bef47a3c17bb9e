"""The report of a bench run: report.html, report.md and pictures, all made from the records alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["build"]


def build(path: Path, out: Path | None = None) -> list[Path]:
    """Writes the report of the records at `path` (a file, or a directory whose records files merge) into
    `out`, or beside the records. The same records give the same bytes.

    Returns: what was written, the page first.
    Throws: what `model.load` throws; ImportError without a package for the charts; ResourceError, which names
    the file, if one cannot be written."""
    missing = [name for name in ("jinja2", "vl_convert") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"the report needs {' and '.join(missing)}: `pip install 'unisono[bench]'`, or copy the records "
            "to a machine that has them and run `unisono report DIR` there."
        )
    from unisono import files

    from . import html, markdown, plots
    from .model import load

    path = Path(path)
    model = load(path)
    directory = Path(out) if out is not None else path if path.is_dir() else path.parent
    images = plots.write(model, directory)
    page = files.write(directory / "report.html", html.render(model).encode())
    words = markdown.render(model, [image.name for image in images])
    return [page, files.write(directory / "report.md", words.encode()), *images]
