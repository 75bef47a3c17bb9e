// Dispatch and combine of ranks that share the memory of a machine. Each rank writes its rows to the places
// where their receivers have them in the end. Sums return through the chunks of the lane, which stay in the
// cache.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "host/group.hpp"
#include "host/move.hpp"
#include "moe/engine.hpp"
#include "moe/memory.hpp"
#include "moe/route.hpp"
#include "moe/told.hpp"
#include "programs/all_gather.hpp"

namespace unisono::moe {
namespace {

constexpr std::uint32_t kMark = 4;  // of what ranks tell each other, beside those of LocalCommunicator

std::size_t at(std::int32_t i) { return static_cast<std::size_t>(i); }

class HostEngine final : public Engine {
 public:
  HostEngine(Communicator::Impl& impl, const Dims& dims)
      : impl_(impl),
        group_(*impl.machine()),
        lane_(group_.lane()),
        dims_(dims),
        places_(dims),
        memory_(impl.allocate(places_.bytes, Memory::host)),
        parts_(impl.parts_of(memory_.get())),
        slots_(static_cast<std::size_t>(dims.handles), Slot(dims)),
        told_(dims) {}

  void begin_dispatch(const MoeTokens& tokens, int slot, bool routed) override;
  void end_dispatch(MoeReceived& received) override;
  void begin_combine(const MoeOutputs& outputs, int slot) override;
  void end_combine() override {}

 private:
  struct Slot {
    explicit Slot(const Dims& dims) : route(dims) {}
    Route route;
    bool weighted = false;
    std::vector<float> row_weights;  // expert_major: of each received row
  };
  // A step of a combine: some tokens of each rank, and the same bytes of each of their rows.
  struct Window {
    std::size_t first_token, end_token, begin, bytes;
  };

  void meet(const MoeTokens& tokens, int slot, bool routed);
  void push(const MoeTokens& tokens, int slot, bool routed);
  void push_row(const MoeTokens& tokens, std::size_t token);
  void push_meta(const MoeTokens& tokens, std::size_t token, const Route::Hop& hop, int slot, bool routed);
  void copy_to(std::size_t offset, std::size_t width, const byte* from);
  void fill_gaps(Slot& slot, int number);

  void give(const Window& window, const MoeOutputs& outputs);
  void take(const Window& window, const MoeOutputs& outputs);
  void reduce(const Dst& to, const MoeOutputs& outputs, std::size_t token_row, const Window& window);

  byte* part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  template <class T>
  T* mine(std::size_t offset) const {
    return reinterpret_cast<T*>(part(dims_.rank) + offset);
  }

  Communicator::Impl& impl_;
  Group& group_;
  HostThread& lane_;
  const Dims dims_;
  const Places places_;
  std::shared_ptr<void> memory_;
  std::vector<byte*> parts_;
  std::vector<Slot> slots_;
  Told told_;

  // of the phase that has begun
  int slot_ = 0, epoch_ = 0;
  std::vector<std::size_t> widths_;  // of further payloads
  void* out_ = nullptr;
  bool stream_ = false;
  std::vector<byte> codes_, scales_;  // of the row that goes
  struct Target {
    int rank;
    std::size_t row;
  };
  std::vector<Target> targets_;  // of the row that goes
  std::vector<Dst> dsts_;
  std::vector<const byte*> sources_, sums_;
  std::vector<float> source_weights_;
  std::vector<std::size_t> next_;  // of each source rank: its next token row to be given
  std::vector<const byte*> pieces_;  // of each rank: what has come of the window, from the next row on
  std::vector<std::size_t> counts_;  // and how many rows those are
  std::vector<byte> own_;  // expert_major: this rank's sums for its own tokens of a window
};

void HostEngine::begin_dispatch(const MoeTokens& tokens, int slot, bool routed) {
  slot_ = slot;
  out_ = tokens.out;
  widths_.clear();
  for (const MoePayload& more : tokens.more) widths_.push_back(more.row_bytes);
  Slot& kept = slots_[static_cast<std::size_t>(slot)];
  if (routed) kept.route.check_same(tokens);
  else kept.route.read(tokens);
  meet(tokens, slot, routed);
  epoch_ = 1 - epoch_;
  kept.weighted = told_.weighted();
  push(tokens, slot, routed);
  for (int i = 1; i < dims_.ranks; ++i) lane_.signal(peer_at(lane_, i), unisono::Slot::meet);
}

// Tells every rank what this rank sends. Nobody reads the memory of this epoch any more once all have told.
void HostEngine::meet(const MoeTokens& tokens, int slot, bool routed) {
  Route& route = slots_[static_cast<std::size_t>(slot)].route;
  told_.tell(tokens, slot, routed, route);
  lane_.reach_far(false);
  lane_.mark(kMark);
  if (dims_.ranks > 1) {
    Args args;
    args.in = told_.mine();
    args.out = told_.all();
    args.block = told_.bytes();
    args.bytes = args.block * static_cast<std::size_t>(dims_.ranks);
    PacketChannel<HostThread> channel(lane_);
    all_gather_push(channel, args);
  } else {
    std::memcpy(told_.all(), told_.mine(), told_.bytes());
  }
  told_.compare(impl_);
  if (!routed) route.lay_out(told_.numbers(), told_.stride());
}

void HostEngine::push(const MoeTokens& tokens, int slot, bool routed) {
  const Route& route = slots_[static_cast<std::size_t>(slot)].route;
  const std::size_t bytes = dims_.sent_bytes * tokens.tokens * static_cast<std::size_t>(dims_.ranks);
  stream_ = bytes >= group_.stream_bytes();
  for (std::size_t t = 0; t < tokens.tokens; ++t) {
    targets_.clear();
    for (const Route::Hop& hop : route.hops(t)) {
      if (dims_.expert_major()) {
        for (const Route::Pair& pair : route.pairs(hop))
          if (pair.row != Route::kDropped) targets_.push_back({hop.rank, at(pair.row)});
      } else if (route.received(hop)) {
        targets_.push_back({hop.rank, route.row_there(hop)});
      }
      if (route.received(hop)) push_meta(tokens, t, hop, slot, routed);
    }
    if (!targets_.empty()) push_row(tokens, t);
  }
}

void HostEngine::push_row(const MoeTokens& tokens, std::size_t token) {
  const byte* row = static_cast<const byte*>(tokens.x) + token * dims_.row_bytes;
  if (dims_.scales != MoeScales::none) {
    codes_.resize(dims_.sent_bytes);
    scales_.resize(dims_.scale_bytes);
    host::kernels().rows.quantise[static_cast<int>(dims_.dtype)][static_cast<int>(dims_.scales)](
        codes_.data(), scales_.data(), row, dims_.hidden);
    row = codes_.data();
    copy_to(places_.scales(epoch_), dims_.scale_bytes, scales_.data());
  }
  copy_to(places_.x(epoch_), dims_.sent_bytes, row);
  for (std::size_t m = 0; m < widths_.size(); ++m)
    copy_to(places_.more(epoch_, widths_, m), widths_[m],
            static_cast<const byte*>(tokens.more[m].data) + token * widths_[m]);
}

// Copies a row to all its targets, in an array that begins at `offset` of each rank's memory.
void HostEngine::copy_to(std::size_t offset, std::size_t width, const byte* from) {
  dsts_.clear();
  for (const Target& target : targets_)
    dsts_.push_back({part(target.rank) + offset + target.row * width, stream_});
  lane_.move(dsts_.data(), static_cast<int>(dsts_.size()), &from, 1, width);
}

// Tells a receiver of a token's number, experts and weights there.
void HostEngine::push_meta(const MoeTokens& tokens, std::size_t token, const Route::Hop& hop, int slot,
                           bool routed) {
  const Route& route = slots_[static_cast<std::size_t>(slot)].route;
  const std::size_t row = route.row_there(hop), k = static_cast<std::size_t>(dims_.top_k);
  byte* const there = part(hop.rank);
  if (!routed) {
    reinterpret_cast<std::int32_t*>(there + places_.token(slot))[row] = static_cast<std::int32_t>(token);
    auto* const idx = reinterpret_cast<std::int32_t*>(there + places_.idx(slot)) + row * k;
    std::fill_n(idx, k, -1);
    for (const Route::Pair& pair : route.pairs(hop)) idx[pair.place] = pair.expert;
  }
  if (!tokens.weights) return;
  auto* const weights = reinterpret_cast<float*>(there + places_.weights(slot)) + row * k;
  std::fill_n(weights, k, 0.0f);
  for (const Route::Pair& pair : route.pairs(hop))
    weights[pair.place] = tokens.weights[token * k + at(pair.place)];
}

void HostEngine::end_dispatch(MoeReceived& received) {
  for (int i = 1; i < dims_.ranks; ++i) lane_.wait(peer_at(lane_, i), unisono::Slot::meet);
  Slot& slot = slots_[static_cast<std::size_t>(slot_)];
  Route& route = slot.route;
  const auto* const idx = mine<std::int32_t>(places_.idx(slot_));
  route.sort(idx);
  fill_gaps(slot, slot_);
  byte* const x = mine<byte>(places_.x(epoch_));
  if (out_) {
    auto* const out = static_cast<byte*>(out_);
    if (dims_.layout == MoeLayout::rank_major) {
      for (int s = 0; s < dims_.ranks; ++s) {
        const std::size_t first = route.first_from(s) * dims_.sent_bytes;
        std::memcpy(out + first, x + first, route.received_from(s) * dims_.sent_bytes);
      }
    } else {
      std::memcpy(out, x, at(route.rows) * dims_.sent_bytes);
    }
  }
  received.x = out_ ? out_ : x;
  received.scales = dims_.scale_bytes > 0 ? mine<void>(places_.scales(epoch_)) : nullptr;
  for (std::size_t m = 0; m < widths_.size(); ++m)
    received.more.push_back(mine<void>(places_.more(epoch_, widths_, m)));
  received.counts = route.counts.data();
  received.offsets = route.offsets.data();
  received.source_rows = route.source_rows.data();
  if (dims_.expert_major()) {
    received.row_expert = route.row_expert.data();
    received.weights = slot.weighted ? slot.row_weights.data() : nullptr;
  } else {
    received.topk_idx = idx;
    received.expert_rows = route.expert_rows.data();
    received.weights = slot.weighted ? mine<float>(places_.weights(slot_)) : nullptr;
  }
  received.rows = &route.rows;
  received.dropped = &route.dropped;
  received.rows_now = at(route.rows);
}

// Fills in what no token fills, and with expert_major each row's weight.
void HostEngine::fill_gaps(Slot& slot, int number) {
  const Route& route = slot.route;
  const std::size_t k = static_cast<std::size_t>(dims_.top_k);
  auto* const idx = mine<std::int32_t>(places_.idx(number));
  auto* const weights = mine<float>(places_.weights(number));
  if (dims_.layout == MoeLayout::rank_major)
    for (int s = 0; s < dims_.ranks; ++s) {
      const std::size_t first = (route.first_from(s) + route.received_from(s)) * k;
      const std::size_t end = (route.first_from(s) + dims_.max_tokens) * k;
      std::fill(idx + first, idx + end, -1);
      std::fill(weights + first, weights + end, 0.0f);
    }
  if (!dims_.expert_major()) return;
  if (slot.weighted) {
    slot.row_weights.assign(dims_.rows_held, 0.0f);
    for (int s = 0; s < dims_.ranks; ++s)
      for (std::size_t i = route.first_from(s) * k; i < (route.first_from(s) + route.received_from(s)) * k;
           ++i)
        if (idx[i] >= 0 && route.pair_rows[i] != Route::kDropped)
          slot.row_weights[at(route.pair_rows[i])] = weights[i];
  }
  for (std::size_t e = 0; e < route.counts.size(); ++e)
    for (std::size_t row = at(route.offsets[e] + route.counts[e]); row < at(route.offsets[e + 1]); ++row) {
      const auto clear = [&](std::size_t offset, std::size_t width) {
        std::memset(mine<byte>(offset) + row * width, 0, width);
      };
      clear(places_.x(epoch_), dims_.sent_bytes);
      clear(places_.scales(epoch_), dims_.scale_bytes);
      for (std::size_t m = 0; m < widths_.size(); ++m) clear(places_.more(epoch_, widths_, m), widths_[m]);
    }
}

void HostEngine::begin_combine(const MoeOutputs& outputs, int slot) {
  slot_ = slot;
  const Route& route = slots_[static_cast<std::size_t>(slot)].route;
  lane_.reach_far(false);
  lane_.prepare(outputs.dtype, Op::sum);
  lane_.mark(told_.mark_of_combine(outputs, slot));
  stream_ = outputs.row_bytes * route.tokens() >= group_.stream_bytes();
  next_.assign(static_cast<std::size_t>(dims_.ranks), 0);
  pieces_.assign(static_cast<std::size_t>(dims_.ranks), nullptr);
  if (outputs.row_bytes == 0) return;
  const std::size_t capacity = ChunkChannel<HostThread>(lane_).capacity();
  const std::size_t slice = std::min(outputs.row_bytes, capacity / kAlign * kAlign);
  const std::size_t tokens = std::max<std::size_t>(capacity / slice, 1);  // of a window
  const std::size_t steps = (route.most_tokens() + tokens - 1) / tokens;
  const auto window = [&](std::size_t step) {
    const std::size_t first = step % steps * tokens, begin = step / steps * slice;
    return Window{first, first + tokens, begin, std::min(slice, outputs.row_bytes - begin)};
  };
  const std::size_t slices = (outputs.row_bytes + slice - 1) / slice;
  for (std::size_t step = 0; step <= steps * slices; ++step) {  // gives a step before it takes the one before
    if (step < steps * slices) give(window(step), outputs);
    if (step > 0) take(window(step - 1), outputs);
  }
}

// Gives every peer the sums of its tokens in the window.
void HostEngine::give(const Window& window, const MoeOutputs& outputs) {
  const Route& route = slots_[static_cast<std::size_t>(slot_)].route;
  const auto* const token_of = mine<std::int32_t>(places_.token(slot_));
  ChunkChannel<HostThread> channel(lane_);
  for (int i = 1; i < dims_.ranks; ++i) {
    const int peer = peer_at(lane_, i);
    std::size_t& next = next_[static_cast<std::size_t>(peer)];
    if (window.first_token == 0) next = 0;
    const std::size_t first = route.first_from(peer), count = route.received_from(peer), begin = next;
    while (next < count && at(token_of[first + next]) < window.end_token) ++next;
    if (next == begin) continue;
    const std::size_t bytes = (next - begin) * window.bytes;
    const Dst to = channel.reserve(peer, bytes);
    for (std::size_t row = begin; row < next; ++row)
      reduce({to.at + (row - begin) * window.bytes, to.stream}, outputs, first + row, window);
    channel.commit(peer, bytes);
  }
}

// Writes this rank's sum for a token row, or the part of it that is in the window.
void HostEngine::reduce(const Dst& to, const MoeOutputs& outputs, std::size_t token_row, const Window& window) {
  const byte* const y = static_cast<const byte*>(outputs.y) + window.begin;
  const Slot& slot = slots_[static_cast<std::size_t>(slot_)];
  if (!dims_.expert_major()) {
    const byte* const from = y + token_row * outputs.row_bytes;
    return lane_.move(&to, 1, &from, 1, window.bytes);
  }
  const float* const weights = outputs.weights ? outputs.weights
                               : slot.weighted ? slot.row_weights.data()
                                               : nullptr;
  const std::size_t k = static_cast<std::size_t>(dims_.top_k);
  sources_.clear();
  source_weights_.clear();
  for (std::size_t i = token_row * k; i < (token_row + 1) * k; ++i) {
    const std::int32_t row = slot.route.pair_rows[i];
    if (row == Route::kDropped) continue;
    sources_.push_back(y + at(row) * outputs.row_bytes);
    if (weights) source_weights_.push_back(weights[row]);
  }
  if (sources_.empty()) {
    std::memset(to.at, 0, window.bytes);
    return;
  }
  host::kernels().rows.weigh[static_cast<int>(outputs.dtype)](
      to.at, sources_.data(), weights ? source_weights_.data() : nullptr, static_cast<int>(sources_.size()),
      window.bytes / size_of(outputs.dtype));
}

// Sums what has come for this rank's own tokens in the window.
void HostEngine::take(const Window& window, const MoeOutputs& outputs) {
  const Route& route = slots_[static_cast<std::size_t>(slot_)].route;
  ChunkChannel<HostThread> channel(lane_);
  const std::size_t end = std::min(window.end_token, route.tokens());
  const byte* const y = static_cast<const byte*>(outputs.y);
  own_.resize(window.bytes);
  std::fill(pieces_.begin(), pieces_.end(), nullptr);
  counts_.assign(static_cast<std::size_t>(dims_.ranks), 0);
  for (std::size_t t = window.first_token; t < end; ++t)
    for (const Route::Hop& hop : route.hops(t))
      if (hop.rank != dims_.rank && route.received(hop)) ++counts_[at(hop.rank)];
  for (std::size_t t = window.first_token; t < end; ++t) {
    sums_.clear();
    for (const Route::Hop& hop : route.hops(t)) {
      if (!route.received(hop)) continue;
      if (hop.rank != dims_.rank) {
        const byte*& piece = pieces_[at(hop.rank)];
        if (!piece) piece = channel.arrived(hop.rank, counts_[at(hop.rank)] * window.bytes);
        sums_.push_back(piece);
        piece += window.bytes;
      } else if (dims_.expert_major()) {
        reduce({own_.data()}, outputs, route.row_there(hop), window);
        sums_.push_back(own_.data());
      } else {
        sums_.push_back(y + route.row_there(hop) * outputs.row_bytes + window.begin);
      }
    }
    const std::size_t offset = t * outputs.row_bytes + window.begin;
    if (outputs.bias) sums_.push_back(static_cast<const byte*>(outputs.bias) + offset);
    const Dst to{static_cast<byte*>(outputs.out) + offset, stream_};
    if (sums_.empty()) std::memset(to.at, 0, window.bytes);
    else lane_.move(&to, 1, sums_.data(), static_cast<int>(sums_.size()), window.bytes);
  }
  for (int p = 0; p < dims_.ranks; ++p)
    if (counts_[static_cast<std::size_t>(p)] > 0) channel.release(p);
}

}  // namespace

std::unique_ptr<Engine> make_host_engine(Communicator::Impl& impl, const Dims& dims) {
  return std::make_unique<HostEngine>(impl, dims);
}

}  // namespace unisono::moe
