#!/usr/bin/env python3
"""Puts the adapter for this environment's torch into a wheel: whoever has that torch then compiles nothing.

prebuild.py WHEEL. Requires the package unisono of the same sources. Does nothing without torch. RECORD is
written by auditwheel.
"""

import importlib.util
import sys
import zipfile
from pathlib import Path


def main(wheel: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        print(
            "There is no torch here: the wheel's users compile the adapter for torch when they first use it."
        )
        return
    from unisono.torch.distributed import build

    place = build.prebuilt()
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as opened:
        opened.write(build.built(), str(place.relative_to(place.parents[4])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
