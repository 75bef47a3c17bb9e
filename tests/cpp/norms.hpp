// Rows for fused norms, and the arrays of a call.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

#include "reference.hpp"
#include "unisono/fused.hpp"

namespace unisono::test {

inline float read(DType dtype, const std::byte* at, std::size_t i) {
  if (dtype == DType::f32) return get<float>(at, i);
  return static_cast<float>(decode(*format_of(dtype), get<std::uint16_t>(at, i)));
}
inline void write(DType dtype, std::byte* at, std::size_t i, float value) {
  if (dtype == DType::f32) put(at, i, value);
  else put(at, i, static_cast<std::uint16_t>(encode(*format_of(dtype), value)));
}
inline float rounded(DType dtype, float value) {
  std::byte at[4];
  write(dtype, at, 0, value);
  return read(dtype, at, 0);
}

// Returns a row of one scale. specials: some elements are zeros, infinities or NaN.
inline Bytes row_of(DType dtype, std::size_t count, std::uint64_t seed, bool specials) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Bytes row(count * size_of(dtype));
  const float scale = std::ldexp(1.0f, static_cast<int>(seed % 24) - 14);
  for (std::size_t i = 0; i < count; ++i) {
    float value = normal(random) * scale;
    if (random() % 32 == 0) value = random() % 2 ? 0.0f : -0.0f;
    if (specials && random() % 64 == 0) value = random() % 2 ? NAN : -INFINITY;
    write(dtype, row.data(), i, value);
  }
  return row;
}

// The arrays of a rank's call.
struct Arrays {
  Bytes x, residual, weight, out, residual_out, scales;
  NormCall call;
  Arrays(DType dtype, std::size_t rows, std::size_t hidden, RowRange held, int rank, NormQuant quant)
      : x(row_of(dtype, rows * hidden, static_cast<std::uint64_t>(rank) + 100, false)),
        residual(row_of(dtype, rows * hidden, 7, false)),
        weight(row_of(dtype, hidden, 14, false)),
        out(rows * hidden * size_of(dtype)),
        residual_out(held.count * hidden * size_of(dtype)),
        scales(rows * norm_scale_bytes(quant, hidden)) {
    call = {.x = x.data(),
            .residual = residual.data() + held.first * hidden * size_of(dtype),
            .weight = weight.data(),
            .out = out.data(),
            .residual_out = residual_out.data(),
            .scales = scales.data(),
            .rows = rows,
            .hidden = hidden,
            .dtype = dtype,
            .quant = quant,
            .scale = 0.02f};
  }
};

}  // namespace unisono::test
