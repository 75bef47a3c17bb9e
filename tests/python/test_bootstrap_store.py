"""The bootstrap over a Store: the smallest shape, hostile values, torch's stores, torchrun."""

from __future__ import annotations

import builtins
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bootstrap_programs import AGAIN, GATHER, shell
from ranks import free_port
from unisono import bootstrap
from unisono.bootstrap.hub import HEADER_BYTES, Kind, encode
from unisono.bootstrap.store import StoreBootstrap
from unisono.errors import PeerLostError, TimeoutError, UnisonoError, UsageError
from unisono.launch import World

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("ranks_find_unisono")]
GOOD = encode(Kind.DATA, 1, (0, 0), b"payload", 1000)


class Dict:
    """A Store of the smallest shape: set and get."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}

    def set(self, key: str, value: bytes) -> None:
        self.keys[key] = value

    def get(self, key: str) -> bytes:
        try:
            return self.keys[key]  # type: ignore[no-any-return]
        except KeyError:
            raise builtins.TimeoutError(key) from None


def test_store_of_the_smallest_shape() -> None:
    store = Dict()
    world = World(0, 2, 0, 2, "explicit")
    mine = bootstrap.make(world, store)
    assert isinstance(mine, StoreBootstrap)
    with pytest.raises(TimeoutError, match=r"rank 1 did not reach all_gather 0 .* rank 0 waited 30 s"):
        mine.all_gather(b"x")
    with pytest.raises(UsageError, match=r"rank=\.\.\., size=\.\.\."):
        bootstrap.make(World(0, 1, 0, 1, "none"), store)
    mine.close()
    mine.close()
    with pytest.raises(UsageError, match="closed"):
        mine.all_gather(b"")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "cut message for rank 1"),
        (b"UNSO", "cut message for rank 1"),
        (b"GET / HTTP", "rank 1 bytes that are no Unisono message"),
        (GOOD[:24] + b"\xff\xff\xff\xff", "length 4294967295"),
        (encode(Kind.DATA, 0, (0, 0), b""), "does not fit its key"),
        (encode(Kind.DATA, 1, (0, 9), b""), "does not fit its key"),
        (encode(Kind.LOST, 1, (0, 0), b""), "does not fit its key"),
        (GOOD + GOOD, "cut message"),
        ("text", "gave a str"),
        (None, "gave a NoneType"),
    ],
)
def test_store_with_hostile_values(value: object, words: str) -> None:
    store = Dict()
    mine = StoreBootstrap(store, 0, 2)
    channel = mine._channel
    if isinstance(value, bytes) and len(value) >= HEADER_BYTES and words == "does not fit its key":
        value = value[:12] + channel.to_bytes(4, "big") + value[16:]
    store.keys[f"unisono/{channel}/0/1"] = value
    with pytest.raises(UnisonoError, match=words):
        mine.all_gather(b"x")


def test_store_that_breaks() -> None:
    class Broken(Dict):
        def get(self, key: str) -> bytes:
            raise ConnectionResetError("reset")

    with pytest.raises(PeerLostError, match=r"Store was lost while rank 0 waited for rank 1.*reset"):
        StoreBootstrap(Broken(), 0, 2).all_gather(b"")


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["HashStore", "FileStore"])
def test_torch_stores_between_threads(kind: str, tmp_path: Path) -> None:
    distributed: Any = importlib.import_module("torch.distributed")
    hash_store, path = distributed.HashStore(), str(tmp_path / "store")
    results = {}

    def body(rank: int) -> None:
        store = hash_store if kind == "HashStore" else distributed.FileStore(path, 3)
        for turn in range(2):  # the second bootstrap must not meet the first one's keys
            mine = bootstrap.make(World(rank, 3, rank, 3, "explicit"), store)
            results[rank, turn] = [mine.all_gather(b"%d%d" % (rank, turn)) for _ in range(3)]

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns = {turn: [[b"%d%d" % (rank, turn) for rank in range(3)]] * 3 for turn in range(2)}
    assert results == {(rank, turn): turns[turn] for rank in range(3) for turn in range(2)}


@pytest.mark.torch
def test_torch_store_names_the_rank_that_never_arrives() -> None:
    distributed: Any = importlib.import_module("torch.distributed")
    late = bootstrap.make(World(0, 2, 0, 2, "explicit"), distributed.HashStore(), timeout_s=0.1)
    with pytest.raises(TimeoutError, match="rank 1 did not reach all_gather 0"):
        late.all_gather(b"")


@pytest.mark.torch
def test_torchrun() -> None:
    words = "-m torch.distributed.run --nproc-per-node 2 --standalone --local-addr 127.0.0.1"
    status, lines, errors = shell([sys.executable, *words.split(), str(GATHER)])
    assert (status, lines) == (0, [f"{rank} 2 StoreBootstrap" for rank in range(2)]), errors


@pytest.mark.torch
@pytest.mark.parametrize(("program", "name"), [(GATHER, "StoreBootstrap"), (AGAIN, "6.0")])
def test_torch_variables_set_by_hand(program: Path, name: str) -> None:
    """Without torchrun's agent, rank 0 serves the Store, and must not leave before the others have read.
    Later communicators find the same Store."""
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)], env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    out = [rank.communicate()[0] for rank in ranks]
    assert out == [f"0 2 {name}\n", f"1 2 {name}\n"]


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_address_of_torch_is_an_error(missing: str) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    del env[missing]
    with pytest.raises(UsageError, match=f"{missing} is not: start the program with torchrun"):
        bootstrap.make(World(0, 2, 0, 2, "torchrun"), env=env)


def test_missing_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(UsageError, match=r"torch cannot be imported .*install torch, or start"):
        bootstrap.make(World(0, 2, 0, 2, "torchrun"), env=env)
