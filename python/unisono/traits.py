"""Properties of each collective, algorithm and dtype, from the core (src/base/traits.hpp)."""

from ._core import AlgorithmTraits, CollectiveTraits, dtype_sizes, has_op, op_names
from ._core import algorithm_traits as algorithm
from ._core import collective_traits as collective

__all__ = [
    "AlgorithmTraits",
    "CollectiveTraits",
    "algorithm",
    "collective",
    "dtype_sizes",
    "has_op",
    "op_names",
]
