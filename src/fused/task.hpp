// A call of fused.hpp that has passed its checks, with the sizes that follow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/bytes.hpp"
#include "host/norms.hpp"
#include "unisono/fused.hpp"

namespace unisono::fused {

struct Task {
  // Throws UsageError for a call that cannot be.
  Task(host::Norm kind, const NormCall& call, int rank, int ranks);

  host::Norm kind;
  NormCall call;
  int rank, ranks;
  std::size_t row_bytes;    // of x, residual and residual_out
  std::size_t out_bytes;    // of a row of out
  std::size_t scale_bytes;  // of its scales
  RowRange held;            // the rows of residual and residual_out
  bool streams = false;     // out goes around the cache

  RowRange owned_by(int owner) const { return owned_rows(call.rows, owner, ranks); }
  // Returns at most `most` of them, from number `begin` on.
  RowRange owned_by(int owner, std::size_t begin, std::size_t most) const {
    const RowRange own = owned_by(owner);
    const std::size_t before = std::min(begin, own.count);
    return {own.first + before, std::min(most, own.count - before)};
  }
  const byte* x(std::size_t row) const { return static_cast<const byte*>(call.x) + row * row_bytes; }
  const byte* residual(std::size_t row) const {
    return static_cast<const byte*>(call.residual) + (row - held.first) * row_bytes;
  }
  byte* residual_out(std::size_t row) const {
    return static_cast<byte*>(call.residual_out) + (row - held.first) * row_bytes;
  }
  byte* out(std::size_t row) const { return static_cast<byte*>(call.out) + row * out_bytes; }
  byte* scales(std::size_t row) const { return static_cast<byte*>(call.scales) + row * scale_bytes; }

  std::string_view name() const {
    return kind == host::Norm::rms ? "all_reduce_rms_norm" : "all_reduce_layer_norm";
  }
};

// The arguments that must be alike on every rank.
struct Asked {
  std::int32_t kind, dtype, quant, sharded, algorithm;
  std::int16_t biased, in_place;  // in_place: residual_out is residual, where that decides the algorithm
  float eps, scale;
  std::uint64_t rows, hidden;
  explicit Asked(const Task& task);
  bool operator==(const Asked&) const = default;
  std::string text() const;
  // Returns a nonzero 24-bit hash: calls that differ have different ones, up to one in 2^24.
  std::uint32_t mark() const;
};

}  // namespace unisono::fused
