// The arithmetic of norms on the host: rows are summed with their residual, normalised and quantised. Reached
// by kernels() of move.hpp.
#pragma once

#include <cstddef>

#include "base/bytes.hpp"
#include "unisono/fused.hpp"
#include "unisono/types.hpp"

namespace unisono::host {

enum class Norm : std::uint8_t { rms, layer };
inline constexpr int kNorms = 2;

// Writes round(round((x_0 + x_1) + ...) + residual) over `n` sources in order. `out` may be a source or the
// residual.
using Join = void (*)(byte* out, const byte* const* srcs, int n, const byte* residual, std::size_t count);

struct NormParameters {
  const byte* weight;
  const byte* bias;  // null: none
  float eps;
  bool stream = false;  // `out`, which is not `row`, goes around the cache
};
// Writes a normalised row. `out` may be `row`. next: a row that is read soon, whose lines are asked for
// meanwhile; else `row`.
using Normalise = void (*)(byte* out, const byte* row, const byte* next, const NormParameters& parameters,
                           std::size_t count);

// Writes a row as e4m3 codes with its scales, if the form has any. inverse: 1 / the scale of fp8.
using QuantiseNorm = void (*)(byte* codes, byte* scales, const byte* row, float inverse, std::size_t count);

struct Norms {
  Join join[kDTypes];                           // null except for f32, f16 and bf16
  Normalise normalise[kDTypes][kNorms];         // so also here
  QuantiseNorm quantise[kDTypes][kNormQuants];  // so also here; null for NormQuant::none
};

}  // namespace unisono::host
