"""Runs torch's own DistributedTest, from its wheel, with the backend that BACKEND names, else unisono.

From torch 2.14 on, BACKEND=gloo UNISONO_TORCH_REPLACE=gloo runs Unisono under gloo's name.
It takes unittest's arguments. WORLD_SIZE is 3 if it is not set: the suite's groups need that many ranks. It
needs expecttest. Ranks are forked, since torch's tests take long to import.
"""

import os
import sys

os.environ.setdefault("BACKEND", "unisono")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.pop("CI", None)  # with it torch writes reports, by a package that is not installed

import torch
from torch.testing._internal.common_distributed import DistTestCases

for feature in ("plugin", "ddp", "subgroup"):
    DistTestCases.backend_feature[feature].add(os.environ["BACKEND"])

from torch.testing._internal.common_utils import run_tests  # noqa: E402 - after the features
from torch.testing._internal.distributed import distributed_test  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402

if os.environ.get("UNISONO_TORCH_REPLACE"):
    # Tests look in the profiler for events of the group's name, gloo. Unisono's events say unisono.
    distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()


class TestDistributed(TestDistBackend, DistributedTest._DistTestBase):
    """The suite, each of whose tests starts its ranks."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    sys.exit(run_tests())
