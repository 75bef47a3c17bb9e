"""What each collective, algorithm and dtype is, as the core has it (src/base/traits.hpp)."""

from ._core import AlgorithmTraits, CollectiveTraits, dtype_sizes, op_names
from ._core import algorithm_traits as algorithm
from ._core import collective_traits as collective

__all__ = ["AlgorithmTraits", "CollectiveTraits", "algorithm", "collective", "dtype_sizes", "op_names"]
