// The kernels of sums across nodes, over arrays of this GPU alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"
#include "unisono/types.hpp"

namespace unisono::cuda {

inline constexpr int kSumThreads = 256;    // of a block
inline constexpr int kFewSources = 64;     // 512 bytes of kernel parameters
inline constexpr int kManySources = 1024;  // 8 KiB; CUDA takes 32,764 bytes

// The addresses of a sum's sources, by value in a kernel's parameters: a captured graph keeps them.
template <int kMost>
struct Sources {
  const byte* at[kMost];
};

// The first parameter of a combine kernel; the fields are nodes::Combine's.
struct CombineTask {
  byte* out;
  const byte* prior;
  std::size_t count;
  int n_sources;
  int ranks;
  bool packs;  // every address is a multiple of 16 bytes
};

// The first parameter of a requantise kernel; the fields are nodes::Requantise's.
struct RequantiseTask {
  byte* out;
  std::size_t count;
  int n_sources;
  bool average;
  bool from_elements, to_elements;
  bool packs;  // the elements' address is a multiple of 16 bytes
};

// Returns the kernel for cudaLaunchKernel. Its parameters are a CombineTask and Sources<kFewSources>, or
// Sources<kManySources> if `many`. The grid may have any size; a block has kSumThreads threads.
const void* combine_kernel(DType dtype, Op op, bool many);

// Returns the kernel whose parameters are a RequantiseTask and Sources as above, or null if the dtype has
// none.
const void* requantise_kernel(DType dtype, Wire wire, bool many);

}  // namespace unisono::cuda
