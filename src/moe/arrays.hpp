// The arrays of a rank's last two dispatches, and the routings that are kept. Rows come into them
// by an engine's own way. The rest is the same for all engines on host memory.
#pragma once

#include <algorithm>
#include <vector>

#include "lane/lane.hpp"
#include "moe/memory.hpp"
#include "moe/route.hpp"
#include "unisono/moe.hpp"

namespace unisono::moe {

class Arrays {
 public:
  // memory: of places.bytes bytes, as `places` lays it out. Both outlive this.
  Arrays(const Dims& dims, const Places& places, byte* memory)
      : dims_(dims),
        places_(places),
        memory_(memory),
        routings_(static_cast<std::size_t>(dims.handles), Routing(dims)) {}

  Route& route(int slot) { return routing(slot).route; }
  const Route& route(int slot) const { return routing(slot).route; }

  // Begins a dispatch by the routing of a slot: its rows replace those of the dispatch before the last.
  void begin(const MoeTokens& tokens, int slot, bool weighted);
  int epoch() const { return epoch_; }
  std::size_t x_bytes() const { return x_bytes_; }                    // of a row of x
  const std::vector<std::size_t>& widths() const { return widths_; }  // of the further payloads

  byte* x() const { return memory_ + places_.x(epoch_); }
  byte* scales() const { return memory_ + places_.scales(epoch_); }
  byte* more(std::size_t number) const { return memory_ + places_.more(epoch_, widths_, number); }
  std::int32_t* token(int slot) const { return array<std::int32_t>(places_.token(slot)); }
  std::int32_t* idx(int slot) const { return array<std::int32_t>(places_.idx(slot)); }
  float* weights(int slot) const { return array<float>(places_.weights(slot)); }

  // Ends the dispatch, once all its rows have come to `x`, and the rest to the arrays. Fills in what no token
  // fills. Requires: the route is sorted.
  void finish(byte* x, MoeReceived& received);

  // expert_major: writes this rank's sum for a token row, or the bytes of it that `part` says.
  void sum(byte* to, const MoeOutputs& outputs, int slot, std::size_t token_row, const Range& part);

 private:
  struct Routing {
    explicit Routing(const Dims& dims) : route(dims) {}
    Route route;
    bool weighted = false;
    std::vector<float> row_weights;  // expert_major: of each received row
  };

  Routing& routing(int slot) { return routings_[static_cast<std::size_t>(slot)]; }
  const Routing& routing(int slot) const { return routings_[static_cast<std::size_t>(slot)]; }
  template <class T>
  T* array(std::size_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  void mark_unused_rows();
  void weigh_rows();
  void clear_gaps(byte* x);

  const Dims& dims_;
  const Places& places_;
  byte* memory_;
  std::vector<Routing> routings_;
  // of the last dispatch
  int slot_ = 0, epoch_ = 0;
  std::size_t x_bytes_ = 0;
  std::vector<std::size_t> widths_;
  std::vector<const byte*> sources_;  // of a sum
  std::vector<float> source_weights_;
};

}  // namespace unisono::moe
