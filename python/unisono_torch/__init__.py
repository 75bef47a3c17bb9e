"""Tells PyTorch the name `unisono`, and imports nothing else.

torch runs the entry point of `torch.backends` within `import torch`. From 2.14 on it runs the one of
`torch.distributed.backends` when the name is used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def _create(options: Any, backend_options: Any) -> Any:
    from unisono.torch.distributed import create

    return create(options, backend_options)


def register() -> None:
    """Registers the backend `unisono` with torch.distributed, if it is not. Raises nothing."""
    try:
        from torch.distributed import Backend

        if "UNISONO" not in Backend._plugins:
            Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:
        return
