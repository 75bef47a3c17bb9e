// The sum of an all_reduce, of arrays that one process has.
#pragma once

#include <cstddef>
#include <span>

#include "unisono/types.hpp"
#include "unisono/version.hpp"

namespace unisono {

struct Combination {
  std::span<const void* const> xs{};  // arrays of `count` elements
  void* out = nullptr;                // `count` elements; may be one of xs
  std::size_t count = 0;
  DType dtype = DType::f32;
  Op op = Op::sum;
  Memory memory = Memory::host;  // of all arrays
  int device = 0;                // of GPU memory: its CUDA ordinal
  void* stream = nullptr;        // of GPU memory: the cudaStream_t on which the sum is enqueued
};

// Gives what an all_reduce gives to ranks that have these arrays, in that order: the same bits. Not
// collective. On a GPU it only enqueues.
// Throws UsageError if xs is empty, has too many arrays for a GPU, or elements without such an op (has_op),
// and ResourceError without a GPU.
UNISONO_API void combine_arrays(const Combination& sum);

}  // namespace unisono
