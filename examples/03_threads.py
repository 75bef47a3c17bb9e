"""Ranks as threads of one process: the same calls, without a launcher.

python examples/03_threads.py
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import unisono


def rank_body(comm: unisono.Communicator) -> np.ndarray:
    blocks = np.arange(comm.size, dtype=np.int64) + 10 * comm.rank  # one element for each rank
    return comm.all_to_all(blocks.reshape(comm.size, 1)).ravel()


comms = unisono.init_threads(3)
with ThreadPoolExecutor(len(comms)) as pool:
    received = np.stack(list(pool.map(rank_body, comms)))
assert (received == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]).all()
print("rank r received element r of everyone:", received.tolist())
