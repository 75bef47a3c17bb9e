// The arithmetic of rows on the host: weighted sums, and 8-bit floats with scales. Reached by kernels() of
// move.hpp.
#pragma once

#include <cstddef>

#include "base/bytes.hpp"
#include "unisono/moe.hpp"
#include "unisono/types.hpp"

namespace unisono::host {

inline constexpr int kScaleForms = 3;  // values of MoeScales

// Writes round(((w_0 * x_0) + w_1 * x_1) + ...) over `n` rows in order, each product and each sum rounded to
// f32. weights: null gives plain sums, as `reduce` does, and of one row its own bits. `out` may be one of the
// rows. Rows may lie at any address. Requires: n > 0.
using Weigh = void (*)(byte* out, const byte* const* rows, const float* weights, int n, std::size_t count);

// Writes a row of `count` elements as e4m3 codes with their scales (base/scales.hpp).
using Quantise = void (*)(byte* codes, byte* scales, const byte* row, std::size_t count);

struct Rows {
  Weigh weigh[kDTypes];                     // null except for f32, f16 and bf16
  Quantise quantise[kDTypes][kScaleForms];  // so also here; null for MoeScales::none
};

}  // namespace unisono::host
