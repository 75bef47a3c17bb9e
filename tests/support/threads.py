"""Ranks as threads of the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import unisono

Body = Callable[[unisono.Communicator], Any]


@contextmanager
def team(n: int, timeout_s: float = 20, check: bool | None = True) -> Iterator[list[unisono.Communicator]]:
    """Makes communicators of `n` threads, and closes them at the end."""
    communicators = unisono.init_threads(n, timeout_s=timeout_s, check=check)
    try:
        yield communicators
    finally:
        for communicator in communicators:
            communicator.close()


def attempt(communicators: Sequence[unisono.Communicator], body: Body) -> list[Any]:
    """Runs `body` on every rank at once. Returns each result or exception, in rank order."""

    def one(communicator: unisono.Communicator) -> Any:
        try:
            return body(communicator)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(communicators)) as pool:
        return list(pool.map(one, communicators))


def together(communicators: Sequence[unisono.Communicator], body: Body) -> list[Any]:
    """Runs `body` on every rank at once. Returns the results, in rank order. A rank that raises closes its
    communicator, so that the others do not wait for it. The first exception is raised here.
    """
    failures: list[Exception] = []

    def one(communicator: unisono.Communicator) -> Any:
        try:
            return body(communicator)
        except Exception as error:
            failures.append(error)
            communicator.close()
            return None

    with ThreadPoolExecutor(len(communicators)) as pool:
        results = list(pool.map(one, communicators))
    if failures:
        raise failures[0]
    return results


def with_threads(n: int, body: Body, timeout_s: float = 20, check: bool | None = True) -> list[Any]:
    """Runs `together` on new communicators."""
    with team(n, timeout_s, check) as communicators:
        return together(communicators, body)
