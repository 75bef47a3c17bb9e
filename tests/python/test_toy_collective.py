"""Adds a collective to a copy of the tree by the steps of CONTRIBUTING.md, "Adding: a collective"."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

PROGRAM = """// shift: everyone gets the buffer of the rank before.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

template <class Channel>
UNISONO_PROGRAM void shift_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  for (Rounds r(lane, a.bytes, channel.capacity()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    channel.put((me + 1) % n, a.in + begin, bytes);
    channel.take((me + n - 1) % n, {a.out + begin, a.stream}, bytes);
  }
}

}  // namespace unisono
"""

# The steps: file, the line before which the new line goes, the new line.
STEPS = {
    1: [
        ("src/programs/list.hpp", '#include "programs/scatter.hpp"', '#include "programs/shift.hpp"'),
        (
            "src/programs/list.hpp",
            "  F(all_reduce, two_shot, all_reduce_two_shot, channel)",
            "  F(shift, push, shift_push, channel) \\",
        ),
    ],
    2: [
        ("include/unisono/types.hpp", "  empty,  ", "  shift,"),
        ("include/unisono/types.hpp", '"empty",', '"shift",'),
        (
            "src/base/traits.hpp",
            "    {.collective = Collective::empty}",
            "    {.collective = Collective::shift, .in = kCount, .out = kCount, .swaps = true},",
        ),
    ],
    3: [
        (
            "include/unisono/communicator.hpp",
            "  void all_gather(const Call& call);",
            "  void shift(const Call& call);  // in, out: count. In place: out == in",
        ),
        (
            "src/core/communicator.cpp",
            "void Communicator::all_gather(const Call& call) {",
            "void Communicator::shift(const Call& c) { impl_->run({Collective::shift, c, rank(), size()}); }",
        ),
    ],
}

MAIN = """#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

#include "unisono/communicator.hpp"

using namespace unisono;

void rank_main(const std::shared_ptr<Bootstrap>& bootstrap, std::string& error) try {
  Communicator comm(bootstrap, {.timeout_s = 60, .check = true});
  const int n = comm.size(), me = comm.rank(), from = (me + n - 1) % n;
  auto value = [](int rank, std::size_t i) { return static_cast<int>(i) * 7 + rank; };
  if (algorithms(Collective::shift) != std::vector<std::string_view>{"push_packets", "push"})
    throw std::runtime_error("other algorithms");
  for (const std::string_view algorithm : {"", "push_packets", "push"})
    for (const std::size_t count : {0, 1, 1000, 300001})
      for (const bool in_place : {false, true}) {
        std::vector<int> in(count), out(count, -1);
        for (std::size_t i = 0; i < count; ++i) in[i] = value(me, i);
        int* to = in_place ? in.data() : out.data();
        comm.shift({.in = in.data(), .out = to, .count = count, .dtype = DType::i32, .algorithm = algorithm});
        for (std::size_t i = 0; i < count; ++i)
          if (to[i] != value(from, i)) throw std::runtime_error("a wrong element");
      }
} catch (const std::exception& thrown) { error = thrown.what(); }

int main() {
  for (const int n : {1, 2, 3}) {
    const auto bootstraps = thread_bootstraps(n, std::chrono::seconds(60));
    std::vector<std::string> errors(static_cast<std::size_t>(n));
    std::vector<std::thread> ranks;
    for (std::size_t r = 0; r < errors.size(); ++r)
      ranks.emplace_back([&, r] { rank_main(bootstraps[r], errors[r]); });
    for (std::thread& rank : ranks) rank.join();
    for (const std::string& error : errors)
      if (!error.empty()) return std::printf("%d ranks: %s\\n", n, error.c_str()), 1;
  }
  std::puts("shifted");
}
"""


def add(root: Path, name: str, before: str, line: str) -> None:
    path = root / name
    text = path.read_text()
    assert text.count(before) == 1, f"{name} has {text.count(before)} places with {before!r}"
    begin = text.index(before)
    path.write_text(text[:begin] + line.lstrip() + "\n" + text[begin:])


def run(*command: object, cwd: Path) -> str:
    # The copy lies elsewhere each time, and compiles to the same.
    env = os.environ | {"CCACHE_BASEDIR": str(cwd), "CCACHE_NOHASHDIR": "1"}
    line = list(map(str, command))
    done = subprocess.run(line, check=False, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_every_file_is_named_in_the_steps() -> None:
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    found = re.search(r"\*\*A collective\*\*:\n(.*?)\*\*An algorithm\*\*", contributing, re.DOTALL)
    assert found
    steps = re.split(r"^\d\. ", found[1], flags=re.MULTILINE)
    assert len(steps) == 5
    for number, edits in STEPS.items():
        assert not {name for name, _, _ in edits if name not in steps[number]}


@pytest.mark.slow
def test_a_collective_is_added_in_these_steps(tmp_path: Path) -> None:
    if not shutil.which("cmake") or not (REPOSITORY / ".git").exists():
        pytest.skip("needs CMake and a clone of the repository")
    for name in run(
        "git", "ls-files", "-z", "--cached", "CMakeLists.txt", "cmake", "include", "src", cwd=REPOSITORY
    ).split("\0")[:-1]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "src" / "programs" / "shift.hpp").write_text(PROGRAM)
    for edits in STEPS.values():
        for edit in edits:
            add(tmp_path, *edit)
    options = [
        "-DUNISONO_CUDA=OFF",
        "-DUNISONO_FABRIC=OFF",
        "-DCMAKE_BUILD_TYPE=Debug",
        "-DCMAKE_UNITY_BUILD=ON",
    ]
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    run("cmake", "-S", ".", "-B", "build", "-G", "Ninja", *options, cwd=tmp_path)
    run("cmake", "--build", "build", "--target", "unisono_static", cwd=tmp_path)
    (tmp_path / "main.cpp").write_text(MAIN)
    flags = [
        "-std=c++20",
        "-I",
        "include",
        "main.cpp",
        "-o",
        "main",
        "build/libunisono.a",
        "-pthread",
        "-ldl",
    ]
    run(os.environ.get("CXX", "c++"), *flags, cwd=tmp_path)
    assert run("./main", cwd=tmp_path) == "shifted\n"
