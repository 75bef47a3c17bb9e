#!/usr/bin/env python3
"""Shows how far verdicts of the bench hold: a folder of records for each question, and a sentence.

  tools/verdicts.py between OUT   two runs of this build, one after the other: at most 5 % FASTER or SLOWER
  tools/verdicts.py itself OUT    this build beside itself, by unisono ab: at most 2 % FASTER or SLOWER
  tools/verdicts.py slowed OUT    beside this build with --percent 3 added to every call: at least 80 % of
                                  the cases of 64 KiB and more are SLOWER

For a checkout on x86-64 with its build folder (make .venv/.have-unisono), 2 ranks, a quiet machine. OUT is
emptied. The exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from unisono.bench import beside
from unisono.records.stats import Verdict
from unisono.report import compare

ROOT = Path(__file__).resolve().parents[1]
SIZES = "8,64,512,4K,32K,64K,256K,1M,2M,16M"  # with ten collectives, a barrier and two modes 202 cases
LARGE = "64K,256K,1M,2M,16M"
SOURCE = "bindings/py_communicator.cpp"
PLACE = "\n    run(prepared.call, [&]"  # in it, where every collective runs
SLOWED = """
namespace {{
struct Slowed {{
  const unsigned long long begin = __builtin_ia32_rdtsc();
  ~Slowed() {{
    const auto end = __builtin_ia32_rdtsc();
    const auto until = end + (end - begin) * {percent} / 100;
    while (__builtin_ia32_rdtsc() < until) {{}}
  }}
}};
}}  // namespace
"""


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> None:
    subprocess.run([str(word) for word in command], check=True, cwd=cwd)


def unisono(*words: str | Path) -> None:
    """Runs the command in this environment."""
    run([sys.executable, "-m", "unisono", *words])


def copied(folder: Path) -> Path:
    """Copies this process's installation to a folder. Returns the package."""
    for part in beside.own():
        unused = shutil.ignore_patterns("__pycache__", "include")
        shutil.copytree(part, folder / "unisono", dirs_exist_ok=True, ignore=unused)
    return folder / "unisono"


def slow_down(package: Path, percent: float) -> None:
    """Puts a module into the package whose calls spin for `percent` of their own time at their end."""
    build, scratch = ROOT / "build" / "tests", package.parent
    source = (ROOT / SOURCE).read_text()
    if source.count(PLACE) != 1:
        raise SystemExit(f"{SOURCE} has not one line {PLACE.strip()!r}: find where all calls run now.")
    head, mark, tail = source.partition("namespace unisono::python {")
    changed = (
        head
        + SLOWED.format(percent=percent)
        + mark
        + tail.replace(PLACE, f"\n    const Slowed slowed;{PLACE}")
    )
    (scratch / "slowed.cpp").write_text(changed)
    entries = json.loads((build / "compile_commands.json").read_text())
    entry = next(one for one in entries if one["file"] == str(ROOT / SOURCE))
    words = shlex.split(entry["command"])
    before = words[words.index("-o") + 1]
    words = [
        {before: str(scratch / "slowed.o"), entry["file"]: str(scratch / "slowed.cpp")}.get(w, w)
        for w in words
    ]
    run([*words, f"-I{ROOT / 'bindings'}"], build)
    listed = subprocess.run(
        ["ninja", "-C", build, "-t", "commands", "_core"], check=True, capture_output=True, text=True
    )
    link = next(line for line in listed.stdout.splitlines() if before in line and " -shared " in line)
    module = next(package.glob("_core*.so"))
    words = shlex.split(link.removeprefix(": && ").partition(" && ")[0])
    words[words.index("-o") + 1] = str(module)
    words = [str(scratch / "slowed.o") if word == before else word for word in words]
    module.unlink()
    run([*words, "-Wl,-rpath,$ORIGIN/lib"], build)


def between(asked: argparse.Namespace) -> tuple[compare.Comparison, str]:
    how = ["--sizes", SIZES, "--budget", asked.budget, "--launches", asked.launches]
    runs = [asked.out / "first", asked.out / "second"]
    for folder in runs:
        unisono("bench", "--backends", "unisono", "--ranks", "2", *how, "-O", folder, "--no-report")
    return compare.compare(*runs), "two runs of one build"


def ab(asked: argparse.Namespace) -> tuple[compare.Comparison, str]:
    slowed = asked.question == "slowed"
    package = copied(asked.out / ("slowed" if slowed else "same"))
    if slowed:
        slow_down(package, asked.percent)
    sizes = LARGE if slowed else SIZES
    how = ["--sizes", sizes, "--budget", asked.budget, "--launches", asked.launches]
    unisono("ab", package.parent, *asked.collectives, *how, "--ranks", "2", "-O", asked.out / "ab")
    shutil.rmtree(package.parent)
    found = compare.ab(asked.out / "ab", "unisono", f"unisono@{package.parent.name}")
    return found, f"beside itself with {asked.percent:g} % added" if slowed else "a build beside itself"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=["between", "itself", "slowed"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", help="seconds of a run; default: 170 each, 260, or 480")
    parser.add_argument("--launches", help="default: 12, 11, or 24")
    parser.add_argument("--percent", type=float, default=3.0)
    parser.add_argument("--collectives", nargs="*", default=[])
    asked = parser.parse_args()
    budget, launches = {"between": ("170", "12"), "itself": ("260", "11"), "slowed": ("480", "24")}[
        asked.question
    ]
    asked.budget, asked.launches = asked.budget or budget, asked.launches or launches
    asked.out = asked.out.resolve()
    shutil.rmtree(asked.out, ignore_errors=True)
    asked.out.mkdir(parents=True)
    found, what = (between if asked.question == "between" else ab)(asked)
    changes = [c for c in found.changes if asked.question != "slowed" or c.b.key.case.bytes >= 64 << 10]
    counts = {str(verdict): sum(c.verdict is verdict for c in changes) for verdict in Verdict}
    wrong = counts["FASTER"] + counts["SLOWER"]
    share = (counts["SLOWER"] if asked.question == "slowed" else wrong) / max(1, len(changes))
    goal = {"between": 0.05, "itself": 0.02, "slowed": 0.8}[asked.question]
    met = share >= goal if asked.question == "slowed" else share <= goal
    outcome = {"question": what, "launches": int(asked.launches), "budget_s": float(asked.budget)}
    outcome |= {"cases": len(changes), **counts, "share": round(share, 4), "goal": goal, "met": met}
    (asked.out / "outcome.json").write_text(json.dumps(outcome) + "\n")
    verdict = f"{100 * share:.1f} %, {'met' if met else 'MISSED'} ({goal:.0%})"
    print(f"{what}: {len(changes)} cases, {counts}; {verdict}.")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
