// The kernels of the fused norms, and how they are started.
#pragma once

#include <cstddef>

#include "base/bytes.hpp"
#include "base/norm.hpp"
#include "cuda/exchange.hpp"
#include "unisono/fused.hpp"

namespace unisono::fused::gpu {

// What is done with each row's sum. Device memory: residual, residual_out and out have the rows of a call.
struct Work {
  const byte *residual, *weight, *bias;
  byte *residual_out, *out, *scales;
  std::size_t row_bytes, scale_bytes;
  unsigned hidden;
  float eps, inverse;  // inverse: 1 / the scale of quant fp8
  NormQuant quant;
  bool layer;
  bool whole;  // every row begins where 8 elements can be loaded at once
};

inline constexpr int kFewestThreads = 256;  // of a block
inline constexpr unsigned kRowBits = 10;    // of a share that is the row
static_assert(norm::kPartials == 1u << kRowBits);

// The elements of a row that a block has: of each kPartials that follow each other, the block-th stretch of
// 2^bits. So all elements of its partial sums are its own.
struct Share {
  UNISONO_PORTABLE Share(unsigned number, unsigned log2, unsigned hidden) : block(number), bits(log2) {
    constexpr auto kAll = static_cast<unsigned>(norm::kPartials);
    const unsigned rest = hidden % kAll, begin = block << bits, most = 1u << bits;
    count = hidden / kAll << bits;
    if (rest > begin) count += rest - begin < most ? rest - begin : most;
  }
  // Returns which element of the row is the i-th of these.
  UNISONO_PORTABLE unsigned in_row(unsigned i) const {
    constexpr auto kAll = static_cast<unsigned>(norm::kPartials);
    return (i >> bits) * kAll + (block << bits) + (i & ((1u << bits) - 1));
  }
  unsigned block, bits, count;
};

// Elements of the rows that blocks hold in registers, in 256 threads each: more than kNotShort, and at most
// kMostShort. finish's kernels are for at most one of kShort each.
inline constexpr std::size_t kNotShort = 2048, kShort[] = {4096, 7168, 8192}, kMostShort = 8192;

// A block keeps its shares of a kernel's rows in shared memory too, `row_bytes` for each, if that is not 0;
// else it reads them from residual_out again.
inline constexpr std::size_t kMostShared = std::size_t{92} << 10;  // of a block; fits twice on an SM

// The parameter of a kernel that finishes rows of sums, a block each. sums may be any output.
struct Finish {
  Work work;
  const byte* sums;
  unsigned row_bytes;  // as above
};

// The parameter of a kernel that also sums. A cluster of blocks takes a row at a time, each block its share.
struct SumAndFinish {
  cuda::Exchange x;
  Work work;
  const byte* rows;    // x
  std::size_t count;   // of rows
  unsigned steps;      // rows that an owner has; in one step: all rows
  unsigned cluster;    // blocks
  unsigned bits;       // of their shares
  unsigned row_bytes;  // as above
};

// What chooses a kernel that sums. lines, whole, ranks: as exchange_kernel's.
struct Form {
  bool lines, whole;
  int ranks;
  DType dtype;
};

// Returns whether there is a kernel in one step that holds short rows in registers, of as many clusters as
// rows, each of `shares` blocks, with so many messages between two blocks. element: bytes.
constexpr bool is_short(bool lines, std::size_t element, int ranks, unsigned shares, unsigned messages) {
  const bool halves = element == 2;  // wider ones, and more peers, leave fewer registers
  if (messages == 2)
    return lines && (halves ? shares <= 2 && ranks <= 4 : (shares == 2 || shares == 4) && ranks == 2);
  return messages == 1 && (shares == 4 || shares == 8 || (shares == 2 && lines && (halves || ranks == 2)));
}

// Return the kernel of a call, for cudaLaunchKernel. In one step everyone sums every row, in two its owner.
// threads: 256 or 1024. fast: rows are whole, and lie in shared memory. short_rows_kernel: of 256 threads,
// for an RMS norm of short rows that are whole.
const void* finish_kernel(DType dtype, int threads, bool fast);
const void* short_rows_kernel(DType dtype, NormQuant quant, std::size_t hidden);
const void* one_step_kernel(const Form& form);
const void* two_steps_kernel(const Form& form);
// The kernels of an RMS norm of short rows that are whole, in one step, or null: as is_short says.
const void* short_one_step_by_lines(const Form& form, unsigned shares, unsigned messages);
const void* short_one_step_by_packets(const Form& form, unsigned shares, unsigned messages);

// Loads all kernels for so many ranks, so that none is loaded while another one waits for this rank.
void load(int ranks);

}  // namespace unisono::fused::gpu
