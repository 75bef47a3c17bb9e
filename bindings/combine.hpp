// A sum of pieces that lie in the host's memory.
#pragma once

#include <cstddef>
#include <span>

#include "host/move.hpp"

namespace unisono::python {

// See host::Resume. `bytes`: of `out`. prior: wide elements, or null. ranks 0: so is `out`.
inline void combine_bytes(byte* out, std::size_t bytes, const byte* prior,
                          std::span<const byte* const> sources, DType dtype, Op op, int ranks) {
  const host::Kernels& kernels = host::kernels();
  const int type = static_cast<int>(dtype), operation = static_cast<int>(op);
  const int count = static_cast<int>(sources.size());
  if (!prior && ranks == count) {  // the whole sum at once
    const Dst to{out};
    return kernels.reduce[type][operation](&to, 1, sources.data(), ranks, bytes);
  }
  const std::size_t item = ranks == 0 ? kernels.wide_bytes[type] : size_of(dtype);
  kernels.resume[type][operation](out, prior, sources.data(), count, bytes / item, ranks);
}

}  // namespace unisono::python
