// A token's row of x in the form in which it travels.
#pragma once

#include <vector>

#include "host/move.hpp"
#include "moe/dims.hpp"

namespace unisono::moe {

// The row itself; or, if the Moe has scales, its codes and their scales.
class SentRow {
 public:
  explicit SentRow(const Dims& dims)
      : scaled_(dims.scales != MoeScales::none),
        hidden_(dims.hidden),
        row_bytes_(dims.row_bytes),
        quantise_(host::kernels().rows.quantise[static_cast<int>(dims.dtype)][static_cast<int>(dims.scales)]),
        codes_(scaled_ ? dims.sent_bytes : 0),
        scales_(dims.scale_bytes) {}

  // Takes a token's row. Requires: without scales it stays until it has been sent.
  void take(const MoeTokens& tokens, std::size_t token) {
    const auto* const x = static_cast<const byte*>(tokens.x);
    data_ = scaled_ ? codes_.data() : x + token * tokens.row_bytes;
    if (scaled_) quantise_(codes_.data(), scales_.data(), x + token * row_bytes_, hidden_);
  }
  const byte* data() const { return data_; }
  const byte* scales() const { return scales_.data(); }

 private:
  bool scaled_;
  std::size_t hidden_, row_bytes_;
  host::Quantise quantise_;
  std::vector<byte> codes_, scales_;
  const byte* data_ = nullptr;
};

}  // namespace unisono::moe
