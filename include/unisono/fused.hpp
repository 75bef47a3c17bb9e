// An all_reduce together with what follows it in a transformer: the residual is added, and the result is
// normalised and perhaps quantised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "unisono/communicator.hpp"
#include "unisono/types.hpp"
#include "unisono/version.hpp"

namespace unisono {

// How normalised rows are given. none: as they are. Otherwise as 8-bit floats (e4m3), each the nearest to
// element / scale, with scales as f32 or as powers of two:
// fp8: by the scale of the call. Elements beyond 448 times the scale become 448.
// fp8_token, fp8_128: by a scale of each row, or of each 128 elements: max(largest magnitude, 1e-4) / 448.
// mx: by a power of two of each 128 elements, the next above, as its biased exponent in a byte (UE8M0).
// A row or a block with an infinity or a NaN becomes NaN, its scale too (not with fp8).
enum class NormQuant : std::uint8_t { none, fp8, fp8_token, fp8_128, mx };
inline constexpr int kNormQuants = 5;

// How ranks of one machine work together; automatic: as the plan of all_reduce_rms_norm says, by the bytes of
// x. one_shot: every rank gets every row of x, and does all the rest. Not with `sharded`. two_shot: the owner
// of a row sums it and adds the residual. Its results travel. On CPUs the owner does the rest too with
// `quant` or `sharded`. apart: an all_reduce, then the rest; so it is between machines, and on GPUs of more
// than 8 ranks. The plan's two_shot_direct, on CPUs, is two_shot from array to array: in memory that the
// ranks share, or by the kernel's copies. On GPUs one_shot and two_shot go over packets, the others over
// lines of 128 bytes, which need NVLink.
enum class NormAlgorithm : std::uint8_t {
  automatic,
  one_shot,
  two_shot,
  apart,
  one_shot_ll128,
  two_shot_ll128,
};
inline constexpr int kNormAlgorithms = 6;

constexpr std::string_view name_of(NormQuant quant) {
  constexpr std::string_view names[kNormQuants] = {"none", "fp8", "fp8_token", "fp8_128", "mx"};
  return names[static_cast<int>(quant)];
}
constexpr std::string_view name_of(NormAlgorithm algorithm) {
  constexpr std::string_view names[kNormAlgorithms] = {"automatic", "one_shot",       "two_shot",
                                                       "apart",     "one_shot_ll128", "two_shot_ll128"};
  return names[static_cast<int>(algorithm)];
}

// One rank's part of a call. Arrays are contiguous. x and residual are rows of `hidden` elements.
// With `sharded`, residual and residual_out have the rows of `owned_rows` alone.
struct NormCall {
  const void* x = nullptr;         // [rows, hidden]: this rank's part of the sum
  const void* residual = nullptr;  // [rows, hidden]: the same on every rank
  const void* weight = nullptr;    // [hidden]
  const void* bias = nullptr;      // [hidden]; null: none. For all_reduce_layer_norm
  // [rows, hidden] of dtype, or of e4m3 with `quant`. May be x, or without `sharded` residual, if of dtype.
  void* out = nullptr;
  // [rows, hidden]. May be residual, or without `sharded` x. On GPUs, with `quant`, it is residual on every
  // rank or on none.
  void* residual_out = nullptr;
  // fp8_token: [rows] f32. fp8_128: [rows, blocks] f32. mx: [rows, blocks] u8, blocks a multiple of 4. Else
  // null.
  void* scales = nullptr;
  std::size_t rows = 0, hidden = 0;
  DType dtype = DType::bf16;  // f32, f16 or bf16
  float eps = 1e-6f;
  NormQuant quant = NormQuant::none;
  float scale = 1;  // of quant fp8
  bool sharded = false;
  NormAlgorithm algorithm = NormAlgorithm::automatic;  // the bits are the same
  Memory memory = Memory::host;
  void* stream = nullptr;  // of GPU memory: as Call::stream
};

struct RowRange {
  std::size_t first = 0, count = 0;
};
// Returns the rows that a rank owns: the rank-th of `ranks` blocks of ceil(rows / ranks) rows. The last ones
// may have fewer, or none.
constexpr RowRange owned_rows(std::size_t rows, int rank, int ranks) {
  const std::size_t n = static_cast<std::size_t>(ranks), block = (rows + n - 1) / n;
  const std::size_t first =
      block * static_cast<std::size_t>(rank) < rows ? block * static_cast<std::size_t>(rank) : rows;
  return {first, block < rows - first ? block : rows - first};
}
// Returns the bytes of the scales of a row: 0 for none and fp8.
UNISONO_API std::size_t norm_scale_bytes(NormQuant quant, std::size_t hidden);

// Gives residual_out = round(round((x_0 + x_1) + ...) + residual), over the ranks, each rounding to dtype.
// Then out = round((v * (1 / sqrt(mean(v * v) + eps))) * weight) of each row v of residual_out; it is
// quantised last. Collective.
//
// Bits: as if these calls were made apart. All arithmetic is in f32, rounded after each operation. A row's
// squares are summed as src/base/norm.hpp says: alike for every number of ranks, algorithm and lane.
//
// Throws: the errors of error.hpp. UsageError, with nothing sent: an argument cannot be.
// MismatchError: ranks differ in their calls.
UNISONO_API void all_reduce_rms_norm(Communicator& communicator, const NormCall& call);
// Does the same with out = round(((v - m) * (1 / sqrt(mean((v - m) * (v - m)) + eps))) * weight + bias),
// where m = mean(v).
UNISONO_API void all_reduce_layer_norm(Communicator& communicator, const NormCall& call);

}  // namespace unisono
