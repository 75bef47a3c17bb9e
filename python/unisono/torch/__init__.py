"""Unisono for PyTorch: `moe` has dispatch and combine with gradients.

`unisono.torch.deep_ep` has DeepEP's names, and `unisono.torch.flashinfer_moe` is a communication backend of
FlashInfer. Import those two by name. `import unisono` needs none of this, and no PyTorch.
"""

try:
    import torch  # noqa: F401 - the PyTorch package: imports are absolute
except ImportError as error:
    raise ImportError(
        f"unisono.torch needs PyTorch, which cannot be imported ({error}): pip install torch."
    ) from error

from . import moe

__all__ = ["moe"]
