// The host's memory as a space.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "base/wire.hpp"
#include "core/space.hpp"
#include "host/move.hpp"

namespace unisono::nodes {

class HostSpace final : public Space {
 public:
  Memory memory() const override { return Memory::host; }
  std::size_t grain() const override { return std::size_t{128} << 10; }

  byte* scratch(Scratch purpose, int slot, std::size_t bytes) override {
    auto& slots = kept_[static_cast<int>(purpose)];
    if (slots.size() <= static_cast<std::size_t>(slot)) slots.resize(static_cast<std::size_t>(slot) + 1);
    Kept& kept = slots[static_cast<std::size_t>(slot)];
    if (kept.bytes < bytes) {
      kept.data.reset();  // before the new one is made: not both at once
      kept.data.reset(static_cast<byte*>(::operator new[](bytes, std::align_val_t{kAlign})));
      kept.bytes = bytes;
    }
    return kept.data.get();
  }

  void copy(byte* to, const byte* from, std::size_t bytes) override {
    if (to != from && bytes > 0) std::memcpy(to, from, bytes);
  }

  void combine(const Combine& sum) override {
    const host::Kernels& kernels = host::kernels();
    const int type = static_cast<int>(sum.dtype), op = static_cast<int>(sum.op);
    const int count = static_cast<int>(sum.sources.size());
    if (!sum.prior && sum.ranks == count) {  // the whole sum at once
      const Dst to{sum.out};
      kernels.reduce[type][op](&to, 1, sum.sources.data(), count, sum.count * size_of(sum.dtype));
    } else {
      kernels.resume[type][op](sum.out, sum.prior, sum.sources.data(), count, sum.count, sum.ranks);
    }
  }

  void requantise(const Requantise& sum) override {
    const Dst to{sum.out};
    host::kernels().requantise[static_cast<int>(sum.dtype)][static_cast<int>(sum.wire)](
        &to, 1, sum.sources.data(), static_cast<int>(sum.sources.size()),
        {.src = sum.from_elements ? 0 : -1, .dst = sum.to_elements ? 0 : -1}, sum.op == Op::avg, sum.count);
  }

 private:
  struct Free {
    void operator()(byte* data) const { ::operator delete[](data, std::align_val_t{kAlign}); }
  };
  struct Kept {
    std::unique_ptr<byte[], Free> data;
    std::size_t bytes = 0;
  };
  std::vector<Kept> kept_[kScratches];
};

}  // namespace unisono::nodes
