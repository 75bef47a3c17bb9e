"""Two installations of Unisono in the same processes, and the verdict on one of them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import report_data as data
from bench_cli import COMMAND, leave_launchers
from ranks import run as shell
from unisono import records
from unisono.bench import beside
from unisono.cli.app import app
from unisono.records.stats import Verdict
from unisono.report import compare


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_launchers(monkeypatch)


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """An installation of another version: without scatter, and of another number."""
    package = tmp_path / "before" / "unisono"
    for part in beside.own():
        shutil.copytree(part, package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("include"))
    with open(package / "__init__.py", "a") as file:
        file.write("\ndel Communicator.scatter\n__version__ = '0.0.9'\n")
    return package.parent


@pytest.mark.usefixtures("ranks_find_unisono")
def test_ab_runs_both_builds_also_of_other_versions(before: Path, tmp_path: Path) -> None:
    what = ["all_reduce", "scatter", "--sizes", "8,5000", "--memory", "plain,symmetric", "--mode", "latency"]
    how = ["--ranks", "2", "--launches", "1", "-n", "4", "-O", str(tmp_path / "run")]
    ended = shell([*COMMAND, "ab", str(before), *what, *how])
    assert ended.code == 0, str(ended)
    assert "4 cases in both: B is 0 FASTER, 0 SLOWER, 0 SAME, 4 UNCLEAR" in ended.output
    assert "4 cases had fewer than 6 launches" in ended.output
    found = records.read(tmp_path / "run")
    of_other = [result for result in found.results if result.backend == "unisono@before"]
    assert not found.failures and len(of_other) == 4 and len(found.results) == 4 + 8
    assert {result.verification.bound for result in of_other} == {"bit-exact"}
    assert {s.reason for s in found.skips} == {"version 0.0.9 has no scatter."}
    for run in found.runs:
        assert run.libraries["backend unisono@before"].startswith("0.0.9, build ")
        assert str(before) not in msgspec.json.encode(run).decode()


COPIES = """
import gc
from unisono.bench import beside

made = []
for number in range(4):
    with beside.loaded(*beside.own(), mark=number) as copy:
        made.append(copy.init())
gc.collect()
print(len({type(comm).__module__ for comm in made}), *(comm.size for comm in made))
"""


@pytest.mark.usefixtures("ranks_find_unisono")
def test_copies_leave_the_interpreter_its_dictionary() -> None:
    """A process that has lost it hangs or crashes when the next copy is loaded."""
    ended = shell([sys.executable, "-c", COPIES])
    assert ended.code == 0 and ended.output.split() == ["4", "1", "1", "1", "1"], str(ended)


def test_a_prefix_without_an_installation_is_refused(tmp_path: Path) -> None:
    for words in (["ab", str(tmp_path)], ["bench", "--backends", f"unisono,unisono@{tmp_path}"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert "holds no installation of unisono: make one by pip install" in " ".join(result.stderr.split())


def _launches(backend: str, us: list[float], scatter: float = 0.01) -> list[records.Result]:
    rng = np.random.default_rng(len(backend))
    return [
        data.result(
            backend, data.case(), time * rng.lognormal(0, scatter, 60), visits=[20] * 3, launches=[number] * 3
        )
        for number, time in enumerate(us, 1)
    ]


@pytest.mark.parametrize(
    ("slower", "launches", "verdict"),
    [
        (1.03, 10, Verdict.SLOWER),
        (0.97, 10, Verdict.FASTER),
        (1.0, 10, Verdict.SAME),
        (1.009, 10, Verdict.UNCLEAR),  # the interval reaches into the tolerance
        (1.03, 5, Verdict.UNCLEAR),
    ],
)
def test_the_ratio_of_each_launch_is_judged(
    slower: float, launches: int, verdict: Verdict, tmp_path: Path
) -> None:
    """Launches differ by half, far more than the builds."""
    times = 10 * np.random.default_rng(1).uniform(1.0, 1.5, launches)
    heads = [data.run(launch=n, launches=launches) for n in range(1, launches + 1)]
    both = [*_launches("unisono", [*times]), *_launches("unisono@b", [*(slower * times)])]
    data.write(tmp_path, heads, both, [data.end()] * launches)
    (change,) = compare.ab(tmp_path, "unisono", "unisono@b").changes
    assert change.verdict is verdict
    assert change.ratio == pytest.approx(1 / slower, rel=0.005)
