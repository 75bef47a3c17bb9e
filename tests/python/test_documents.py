"""The documents: what they link to is in the repository, pictures included."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "results").rglob("README.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_what_git_tracks(document: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], check=False, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git's")
    tracked = {ROOT / name for name in listed.stdout.splitlines()}
    tracked |= {folder for path in tracked for folder in path.parents}
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text())
    lost = [link for link in links if (document.parent / link).resolve() not in tracked]
    assert not lost, f"{document.name} links to {', '.join(lost)}, which git does not track"
