"""The error for the parts of DeepEP that are not here."""

from __future__ import annotations

from ...errors import UsageError

__all__ = ["MissingError", "missing"]


class MissingError(UsageError, AttributeError):
    """A part of DeepEP is not here. Also an AttributeError, for hasattr() and `from ... import ...`."""


def missing(what: str, instead: str = "use DeepEP itself for it") -> MissingError:
    """Returns the error, for the caller to raise."""
    return MissingError(f"{what} is not in unisono.torch.deep_ep: {instead}.")
