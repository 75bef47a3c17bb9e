"""A machine that only measures may lack the packages of the plots."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import report_data as data

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
ABSENT = "jinja2", "vl_convert"
class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ABSENT else found(name, *a)
from unisono import cli
cli.main()
"""
SUMMARY = """
from pathlib import Path
from unisono.cli import common
from unisono.cli.finish import finish
sys.exit(finish(Path(sys.argv[1]), 0, common.console(), sys.argv[2] == "report"))
"""


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_summary_and_the_gate_need_no_package_of_the_plots(tmp_path: Path) -> None:
    data.write(tmp_path, data.run(), data.sweep(), data.end())
    summary = WITHOUT.replace("from unisono import cli\ncli.main()\n", "") + SUMMARY
    found = run(summary, str(tmp_path), "records")
    assert found.returncode == 0, found.stderr
    assert "against the fastest other backend" in found.stdout
    found = run(summary, str(tmp_path), "report")
    assert found.returncode == 0, found.stderr
    assert "the report needs jinja2 and vl_convert: `pip install 'unisono[bench]'`" in found.stdout
    assert run(WITHOUT, "gate", str(tmp_path)).returncode in (0, 1)


def test_the_report_says_what_it_lacks(tmp_path: Path) -> None:
    data.write(tmp_path, data.run(), data.sweep(), data.end())
    found = run(WITHOUT, "report", str(tmp_path))
    assert found.returncode == 2
    assert "pip install 'unisono[bench]'" in found.stderr
    assert "Traceback" not in found.stderr
