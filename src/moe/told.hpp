// The numbers that the ranks tell each other as a dispatch begins, and their comparison.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "moe/memory.hpp"
#include "moe/route.hpp"

namespace unisono::moe {

class Told {
 public:
  // more: numbers that an engine adds.
  explicit Told(const Dims& dims, std::size_t more = 0)
      : ranks_(static_cast<std::size_t>(dims.ranks)),
        more_(more),
        number_(dims.number),
        stride_(kHead + Route::numbers(dims) + more),
        mine_(stride_),
        all_(stride_ * ranks_) {}

  void tell(const MoeTokens& tokens, int slot, bool routed, const Route& route) {
    std::fill(mine_.begin(), mine_.end(), 0);
    mine_[0] = tokens.weights ? kWeighted : tokens.tokens > 0 ? kPlain : kEither;
    mine_[1] = slot * 2 + (routed ? 1 : 0);
    mine_[2] = static_cast<std::int32_t>(tokens.row_bytes);
    mine_[3] = static_cast<std::int32_t>(tokens.more.size());
    for (std::size_t m = 0; m < tokens.more.size(); ++m)
      mine_[4 + m] = static_cast<std::int32_t>(tokens.more[m].row_bytes);
    mine_[kHead - 2] = number_;
    if (!routed) mine_[kHead - 1] = static_cast<std::int32_t>(tokens.max_tokens);
    route.tell(std::span(mine_).subspan(kHead));
  }
  std::span<std::int32_t> more() { return std::span(mine_).last(more_); }
  // What another rank has added.
  std::span<const std::int32_t> more_of(int rank) const {
    return std::span(all_).subspan(static_cast<std::size_t>(rank + 1) * stride_ - more_, more_);
  }
  // The operands of the exchange: this rank's numbers, and room for everyone's, in rank order.
  const byte* mine() const { return reinterpret_cast<const byte*>(mine_.data()); }
  byte* all() { return reinterpret_cast<byte*>(all_.data()); }
  std::size_t bytes() const { return stride_ * sizeof(std::int32_t); }

  // Fails the communicator if the ranks' calls differ. Whether there are weights is up to ranks with tokens.
  void compare(Communicator::Impl& impl) {
    weighted_ = kEither;
    for (std::size_t r = 0; r < ranks_; ++r) {
      const std::int32_t weights = all_[r * stride_];
      if (weighted_ == kEither) weighted_ = weights;
      if ((weights != kEither && weights != weighted_) ||
          !std::equal(all_.begin() + 1, all_.begin() + kHead, all_.begin() + at(r) + 1))
        impl.disagree("rank " + std::to_string(impl.number(0)) + " dispatches " + text(0) + ", but rank " +
                      std::to_string(impl.number(static_cast<int>(r))) + " " + text(r) +
                      ": make the same call on every rank.");
    }
  }
  // Returns whether the ranks' tokens have weights.
  bool weighted() const { return weighted_ == kWeighted; }
  // As Route::lay_out takes them.
  const std::int32_t* numbers() const { return all_.data() + kHead; }
  std::size_t stride() const { return stride_; }

  // Returns the mark of the pieces of a combine: calls that differ have different ones, up to one in 2^24.
  std::uint32_t mark_of_combine(const MoeOutputs& outputs, int slot) const {
    std::uint64_t hash = 0x9e3779b97f4a7c15u;
    for (const std::uint64_t field :
         {static_cast<std::uint64_t>(outputs.row_bytes), static_cast<std::uint64_t>(outputs.dtype),
          static_cast<std::uint64_t>(slot), static_cast<std::uint64_t>(number_)})
      hash = (hash ^ field) * 0xff51afd7ed558ccdu;
    return static_cast<std::uint32_t>(hash >> 40) | 1u;
  }

 private:
  static constexpr std::size_t kHead = 6 + kMostMore;
  static constexpr std::int32_t kEither = 0, kWeighted = 1, kPlain = 2;
  std::ptrdiff_t at(std::size_t rank) const { return static_cast<std::ptrdiff_t>(rank * stride_); }
  std::string text(std::size_t rank) const {
    const std::int32_t* const head = all_.data() + at(rank);
    std::string said = "rows of " + std::to_string(head[2]) + " bytes";
    said += head[1] % 2 != 0 ? " by a kept routing"
                             : " by a new routing of at most " + std::to_string(head[kHead - 1]) + " tokens";
    said += head[0] == kWeighted ? ", with weights" : ", without weights";
    for (std::int32_t m = 0; m < head[3]; ++m)
      said += (m == 0 ? ", and further rows of " : " and ") + std::to_string(head[4 + m]) + " bytes";
    if (head[kHead - 2] != all_[kHead - 2]) said += ", by another moe";
    return said;
  }

  std::size_t ranks_, more_;
  std::int32_t number_;  // of the Moe
  std::size_t stride_;
  std::int32_t weighted_ = kEither;
  std::vector<std::int32_t> mine_, all_;
};

}  // namespace unisono::moe
