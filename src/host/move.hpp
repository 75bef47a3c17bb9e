// The arithmetic of the host lane: copies and reductions over memory, for the best instruction set of the
// machine.
#pragma once

#include <cstddef>

#include "lane/lane.hpp"
#include "unisono/types.hpp"
#include "unisono/version.hpp"

namespace unisono::host {

// Combines `n_srcs` sources in order and writes every destination; the contract of a lane's move with a
// reduction.
using Reduce = void (*)(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes);

// One source, any number of destinations.
using Copy = void (*)(const Dst* dsts, int n_dsts, const byte* src, std::size_t bytes);

// Combines `n_srcs` sources in order, `count` elements each, after those that `prior` (null: none) has come
// to; `prior` is in wide elements. ranks 0: the result stays wide too, for sources that are still to come;
// else it is finished for so many ranks and rounded. `out` may be `prior` or a source where their elements
// are as wide.
using Resume = void (*)(byte* out, const byte* prior, const byte* const* srcs, int n_srcs, std::size_t count,
                        int ranks);

// A lane's requantise; `average`: sums are divided by the number of sources.
using Requantise = void (*)(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, Plain plain,
                            bool average, std::size_t count);

struct Kernels {
  const char* instruction_set;
  Copy copy;
  Reduce reduce[kDTypes][kOps];
  Resume resume[kDTypes][kOps];
  std::size_t wide_bytes[kDTypes];         // of an element in which a dtype is combined
  Requantise requantise[kDTypes][kWires];  // null where there is none
};

// The kernels for this machine, or for UNISONO_ISA; UsageError when the machine lacks that instruction set.
const Kernels& kernels();

// One for each instruction set that this build has (kernels.cpp, compiled once for each).
namespace baseline {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

}  // namespace unisono::host
