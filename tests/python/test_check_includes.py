"""tools/check_includes.py: the order of the layers, and names that nothing uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPOSITORY / "tools" / "check_includes.py", root]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_repository_is_in_order() -> None:
    done = check(REPOSITORY)
    assert (done.returncode, done.stdout) == (0, "")


def test_an_include_that_points_up_is_named(tmp_path: Path) -> None:
    files = {
        "include/unisono/types.hpp": "#pragma once\n",
        "src/core/plan.cpp": '#include "core/plan.hpp"\n\n#include "host/group.hpp"\n',
        "src/core/plan.hpp": '#include "unisono/types.hpp"\n#include "plans.inc"\n',
        "src/host/group.hpp": '#include "core/plan.hpp"\n',
    }
    done = check(tree(tmp_path, files))
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "src/core/plan.cpp:3: src/core must not include host/group.hpp, which is not below it."
    ]


def test_siblings_do_not_include_each_other(tmp_path: Path) -> None:
    files = {"src/moe/a.hpp": "", "src/nodes/b.hpp": '  # include "moe/a.hpp"\n', "src/new/c.hpp": ""}
    done = check(tree(tmp_path, files))
    assert done.returncode == 1
    assert "src/nodes/b.hpp:1" in done.stdout and "src/new/c.hpp: its folder has no layer" in done.stdout


def test_a_name_that_nothing_uses(tmp_path: Path) -> None:
    text = (
        "using std::map;\n  using host::Group;\n// bitmaps\nGroup make();\nusing Bytes = std::vector<byte>;\n"
    )
    done = check(tree(tmp_path, {"src/core/a.cpp": text}))
    assert done.returncode == 1
    assert done.stdout == "src/core/a.cpp:1: nothing uses map: remove its using.\n"
