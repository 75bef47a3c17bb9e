"""Symmetric memory: shapes and dtypes, too little memory, and its return."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranks
import threads
import unisono

F32 = np.float32


def play(n: int, program: str, *args: object, **more: Any) -> list[Any]:
    return ranks.play(n, f"memory_programs:{program}", *args, **more).results()


def assert_refused(answer: dict[str, Any], *words: str) -> None:
    error = answer["first"]["error"]
    assert error["type"] == "ResourceError", error
    assert "OSError" in error["bases"]
    for word in words:
        assert word in error["text"], error["text"]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ([1 << 45], "f32"),
        ([1 << 62], "u8"),
        ([1 << 63], "u8"),
        ([(1 << 64) - 1], "u8"),
        ([1 << 61], "f64"),
        ([1 << 40, 1 << 40], "f32"),
        ([1 << 32, 1 << 32], "u8"),
    ],
    ids=str,
)
def test_more_than_there_is(shape: list[int], dtype: str) -> None:
    """Refused quickly on every rank, without taking memory; also if the size in bytes wraps."""
    for answer in play(2, "too_much", shape, dtype):
        assert_refused(answer)
        assert answer["sum"] == 2


def test_more_than_there_is_for_all() -> None:
    """Each rank's part alone would fit. No rank takes its part before all parts are added."""
    for answer in play(2, "too_much_together"):
        assert_refused(answer, f"no room for {answer['mib']} MiB of memory for each of 2 ranks")
        assert answer["sum"] == 2


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_AS"])
def test_one_rank_has_no_memory(limit: str) -> None:
    zero, one = play(2, "limited", limit)
    for answer in (zero, one):
        assert_refused(answer, "symmetric memory of 67108864 bytes a rank could not be had")
        assert (answer["sum"], answer["later"]) == (2, 2)
    assert "rank 1 could not reserve its part" in zero["first"]["error"]["text"]
    assert "unisono::" not in one["first"]["error"]["text"]


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_NOFILE"])
def test_init_without_memory(limit: str) -> None:
    answer = play(1, "init_limited", limit)[0]
    assert answer["error"]["type"] == "ResourceError", answer


def test_nothing_stays() -> None:
    for answer in play(2, "opens_and_closes", 12):
        assert answer["first"] == answer["last"]


def test_arrays_hold_no_files_open() -> None:
    assert play(4, "descriptors") == [0] * 4


def test_dropped_memory_is_given_back() -> None:
    for answer in play(2, "drops"):
        assert answer["held"] - answer["start"] >= 2 * 4 * (4 << 20)
        assert answer["after"] - answer["start"] <= 1 << 20
        assert answer["value"] == 3


@pytest.mark.parametrize(("n", "most_mib"), [(2, 0.75), (4, 1.0), (8, 1.25)])
def test_dozens_of_communicators(n: int, most_mib: float) -> None:
    """Each of many communicators takes memory of a rank as its calls move data, and little before."""
    for answer in play(n, "dozens", 64):
        assert answer["mapped"] <= 64
        assert answer["made"] <= 16
        assert answer["small"] <= answer["made"] + 5 * (n - 1)
        assert answer["message"] <= answer["small"] + 64
        assert answer["large"] <= most_mib * 1024


@pytest.mark.parametrize(("n", "far"), [(2, "1"), (2, "0"), (5, "0")])
def test_first_calls(n: int, far: str) -> None:
    """The first call of a communicator takes memory while it moves data."""
    assert play(n, "first_calls", env={"UNISONO_FAR": far}) == [[]] * n


def test_no_memory_for_rings() -> None:
    """A call for whose rings there is no room is refused on every rank, and the communicator goes on."""
    for answer in played_with_mounts("no_room_for_rings"):
        assert_refused(answer, "memory of rings", "could not reserve its part: there is no room", "KiB")
        assert (answer["small"], answer["large"]) == (2, 2)
        assert answer["pair"]["error"]["type"] == "ResourceError", answer
        assert "has no memory for what it shares with the other ranks" in answer["pair"]["error"]["text"]
        assert answer["after"]["error"]["text"] == answer["pair"]["error"]["text"]


def test_memory_outlives_its_communicator() -> None:
    assert play(2, "outlives") == [4, 4]


def test_full_dev_shm() -> None:
    """Shared memory has no files. A /dev/shm of 64 KiB does not matter."""
    for answer in played_with_mounts("without_shared_memory_files"):
        assert answer["free"] <= 64 << 10
        assert answer["sum"] == 2
        assert answer["files"] == []


def played_with_mounts(program: str) -> list[Any]:
    """Plays a program of 2 ranks in a mount namespace of its own, with a /dev/shm of 64 KiB."""
    inside = f"import json, ranks; played = ranks.play(2, 'memory_programs:{program}')"
    inside += "; print(json.dumps(played.results()))"
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" -c "$1"'
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare, which makes mount namespaces (util-linux)")
    for flags in (["-m"], ["-m", "-r"]):
        allowed = subprocess.run(
            ["unshare", *flags, "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /dev/shm"],
            capture_output=True,
            check=False,
        )
        if allowed.returncode == 0:
            break
    else:
        pytest.skip(
            "mounting in a namespace of one's own is not allowed here: " + allowed.stderr.decode().strip()
        )
    ended = ranks.run(["unshare", *flags, "sh", "-c", mount, sys.executable, inside])
    assert ended.code == 0, str(ended)
    answers: list[Any] = json.loads(ended.output.splitlines()[-1])
    return answers


@pytest.mark.parametrize("shape", [0, 1, 7, (3, 5), (2, 0, 4), (), [4, 4]], ids=str)
def test_shapes(shape: Any) -> None:
    with threads.team(2) as comms:
        for array in threads.together(comms, lambda c: c.empty(shape, F32)):
            assert array.shape == np.empty(shape).shape
            assert array.dtype == F32
            array[...] = 2
            assert (array == 2).all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("f32", np.float32),
        ("bf16", ml_dtypes.bfloat16),
        ("f8e4m3", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
        (np.int64, np.int64),
        (np.dtype(np.uint8), np.uint8),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ],
    ids=str,
)
def test_dtypes(dtype: Any, expected: Any) -> None:
    with unisono.init() as comm:
        assert comm.empty(3, dtype).dtype == np.dtype(expected)


@pytest.mark.torch
def test_torch_dtype() -> None:
    import torch

    with unisono.init() as comm:
        assert comm.empty(3, torch.bfloat16).dtype == np.dtype(ml_dtypes.bfloat16)
        assert comm.empty(3, torch.float8_e4m3fn).dtype == np.dtype(ml_dtypes.float8_e4m3fn)


def test_memory_is_aligned_and_apart() -> None:
    with threads.team(2) as comms:

        def body(comm: unisono.Communicator) -> list[int]:
            arrays = [comm.empty(10, F32) for _ in range(5)]
            assert all(array.ctypes.data % 4096 == 0 for array in arrays)
            return [array.ctypes.data for array in arrays]

        places = [place for one in threads.together(comms, body) for place in one]
    assert len(set(places)) == len(places)


def test_no_file_is_ever_made() -> None:
    before = set(Path("/dev/shm").iterdir())
    with threads.team(2) as comms:
        threads.together(comms, lambda c: c.empty(1 << 16, F32))
        new = {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    assert not any("unisono" in name for name in new)
