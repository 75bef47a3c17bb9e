// Where a rank's symmetric memory has what others write there.
#pragma once

#include <span>

#include "moe/dims.hpp"

namespace unisono::moe {

inline constexpr int kEpochs = 2;            // dispatches whose rows are kept
inline constexpr std::size_t kMostMore = 8;  // further payloads

// Offsets in bytes. Arrays have dims.rows_held rows, those of a routing dims.tokens_held.
class Places {
 public:
  explicit Places(const Dims& dims)
      : rows_(dims.rows_held),
        scales_(up(rows_ * dims.sent_bytes)),
        more_(scales_ + up(rows_ * dims.scale_bytes)),
        epoch_(more_ + up(rows_ * dims.more_bytes) + kMostMore * kApart),
        idx_(up(dims.tokens_held * sizeof(std::int32_t))),
        weights_(idx_ + up(dims.tokens_held * static_cast<std::size_t>(dims.top_k) * sizeof(std::int32_t))),
        slot_(weights_ + (weights_ - idx_)),
        bytes(kEpochs * epoch_ + static_cast<std::size_t>(dims.handles) * slot_) {}

  std::size_t x(int epoch) const { return static_cast<std::size_t>(epoch) * epoch_; }
  std::size_t scales(int epoch) const { return x(epoch) + scales_; }
  // widths: bytes of a row of each further payload.
  std::size_t more(int epoch, std::span<const std::size_t> widths, std::size_t number) const {
    std::size_t before = 0;
    for (std::size_t m = 0; m < number; ++m) before += up(rows_ * widths[m]);
    return x(epoch) + more_ + before;
  }
  // A routing's: each token row's number at its source, or in the message that has brought it, its experts
  // here, and their weights.
  std::size_t token(int slot) const { return kEpochs * epoch_ + static_cast<std::size_t>(slot) * slot_; }
  std::size_t idx(int slot) const { return token(slot) + idx_; }
  std::size_t weights(int slot) const { return token(slot) + weights_; }

 private:
  static constexpr std::size_t kApart = 256;  // begins of arrays
  static constexpr std::size_t up(std::size_t bytes) { return round_up(bytes, kApart); }
  std::size_t rows_, scales_, more_, epoch_, idx_, weights_, slot_;

 public:
  std::size_t bytes;  // of the whole
};

}  // namespace unisono::moe
