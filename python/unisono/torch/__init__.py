"""Unisono for PyTorch: `moe` has dispatch and combine with gradients, `matmul` matmuls with their collective.

`unisono.torch.deep_ep` has DeepEP's names, and `unisono.torch.flashinfer_moe` is a communication backend of
FlashInfer. Import those two by name. `import unisono` needs none of this, and no PyTorch.
"""

try:
    import torch  # noqa: F401 - the PyTorch package: imports are absolute
except ImportError as error:
    raise ImportError(
        f"unisono.torch needs PyTorch, which cannot be imported ({error}): pip install torch."
    ) from error

from . import matmul, moe
from .matmul import fused_all_gather_matmul, fused_matmul_reduce_scatter, matmul_all_reduce

__all__ = ["fused_all_gather_matmul", "fused_matmul_reduce_scatter", "matmul", "matmul_all_reduce", "moe"]
