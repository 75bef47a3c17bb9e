"""A rank of the bootstrap tests: joins its run, gathers, and prints its rank, size and bootstrap."""

from __future__ import annotations

import os

from unisono import bootstrap, errors, launch

b = bootstrap.make(launch.from_env(os.environ), timeout_s=60)
got = [b.all_gather(b"r%d" % b.rank), b.all_gather(b""), b.all_gather(b"x" * b.rank * 300000)]
want = [[b"r%d" % i for i in range(b.size)], [b""] * b.size, [b"x" * i * 300000 for i in range(b.size)]]
assert got == want, got
try:
    b.all_gather(bytes((1 << 20) + 1))
except errors.UsageError as error:
    assert "1048576 bytes" in str(error), error
assert b.all_gather(b"more") == [b"more"] * b.size
b.close()
b.close()
os.write(1, f"{b.rank} {b.size} {type(b).__name__}\n".encode())
