// Bytes, and the markers of code that also runs on a GPU.
#pragma once

#include <cstddef>

#if defined(__CUDACC__)
#define UNISONO_PROGRAM __device__
#define UNISONO_PORTABLE __host__ __device__
#else
#define UNISONO_PROGRAM
#define UNISONO_PORTABLE
#endif

namespace unisono {

using byte = std::byte;

inline constexpr std::size_t kAlign = 64;  // bytes; shards and chunks begin at multiples of a cache line

// Returns the parts of `by` that hold `value`; the last may be smaller.
UNISONO_PORTABLE constexpr std::size_t divide_up(std::size_t value, std::size_t by) {
  return (value + by - 1) / by;
}
// Returns the least multiple of `to` that is not below `value`.
UNISONO_PORTABLE constexpr std::size_t round_up(std::size_t value, std::size_t to) {
  return divide_up(value, to) * to;
}
UNISONO_PORTABLE constexpr std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

}  // namespace unisono
