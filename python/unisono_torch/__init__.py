"""Tells PyTorch the name `unisono`, and imports nothing else.

torch runs the entry point of `torch.backends` within `import torch`. From 2.14 on it runs the one of
`torch.distributed.backends` when the name is used.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

__all__ = ["register"]

REPLACE = "UNISONO_TORCH_REPLACE"


def _create(options: Any, backend_options: Any) -> Any:
    from unisono.torch.distributed import create

    return create(options, backend_options)


def _create_gloo(options: Any, _backend_options: Any) -> Any:
    """Returns the backend in place of gloo, whose options torch leaves unused too."""
    return _create(options, None)


def register() -> None:
    """Registers the backend `unisono` with torch.distributed, if it is not, and takes the name that
    UNISONO_TORCH_REPLACE gives. Raises nothing."""
    try:
        from torch.distributed import Backend

        if "UNISONO" not in Backend._plugins:
            Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu", "cuda"])
            _replace()
    except Exception:
        return


def _replace() -> None:
    """Makes gloo a name of Unisono's if the user has asked for it. torch up to 2.13 looks up no such name."""
    from torch import __version__
    from torch.distributed import Backend

    name = os.environ.get(REPLACE, "")
    if name == "gloo" and __version__ >= (2, 14):
        # The type stays custom: DDP's logger takes one of gloo's type for a ProcessGroupGloo, and crashes.
        Backend.register_backend("gloo", _create_gloo, extended_api=True, devices=["cpu", "cuda"])
    elif name == "gloo":
        warnings.warn(
            f"{REPLACE}=gloo needs torch 2.14 or newer, and this is {__version__}: call "
            'init_process_group("unisono") before the framework makes its group.',
            stacklevel=2,
        )
    elif name:
        warnings.warn(f"{REPLACE} takes the name gloo, not {name!r}.", stacklevel=2)
