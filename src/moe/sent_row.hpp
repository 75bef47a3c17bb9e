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
        quantise_(host::kernels().rows.quantise[static_cast<int>(dims.dtype)][static_cast<int>(dims.scales)]),
        codes_(scaled_ ? dims.sent_bytes : 0),
        scales_(dims.scale_bytes) {}

  // Takes the next row. Requires: without scales it stays until it has been sent.
  void take(const byte* row) {
    data_ = scaled_ ? codes_.data() : row;
    if (scaled_) quantise_(codes_.data(), scales_.data(), row, hidden_);
  }
  const byte* data() const { return data_; }
  const byte* scales() const { return scales_.data(); }

 private:
  bool scaled_;
  std::size_t hidden_;
  host::Quantise quantise_;
  std::vector<byte> codes_, scales_;
  const byte* data_ = nullptr;
};

}  // namespace unisono::moe
