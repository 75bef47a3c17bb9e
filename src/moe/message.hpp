// The form of a message of a dispatch.
#pragma once

#include <numeric>
#include <vector>

#include "moe/dims.hpp"

namespace unisono::moe {

// The parts of a message of a dispatch, one after the other, each with a row for each token.
class Message {
 public:
  Message() = default;
  // x: bytes of its row. widths: of the further payloads.
  Message(const Dims& dims, std::size_t x, const std::vector<std::size_t>& widths, bool routed, bool weighted)
      : widths_{x, dims.scale_bytes} {
    const std::size_t k = at(dims.top_k);
    widths_.insert(widths_.end(), widths.begin(), widths.end());
    widths_.push_back(routed ? 0 : k * sizeof(std::int32_t));
    widths_.push_back(weighted ? k * sizeof(float) : 0);
  }
  static std::size_t most_bytes(const Dims& dims) {
    return Message(dims, dims.sent_bytes, {dims.more_bytes}, false, true).token_bytes();
  }

  // The numbers of the parts.
  static constexpr std::size_t kX = 0, kScales = 1;
  static constexpr std::size_t more(std::size_t number) { return 2 + number; }
  std::size_t idx() const { return widths_.size() - 2; }
  std::size_t weights() const { return widths_.size() - 1; }

  std::size_t width(std::size_t part) const { return widths_[part]; }  // of a row
  std::size_t begin(std::size_t part, std::size_t tokens) const { return before(part) * tokens; }
  std::size_t token_bytes() const { return before(widths_.size()); }

 private:
  std::size_t before(std::size_t part) const {
    return std::accumulate(widths_.begin(), widths_.begin() + static_cast<std::ptrdiff_t>(part),
                           std::size_t{0});
  }
  std::vector<std::size_t> widths_;
};

}  // namespace unisono::moe
