// Dispatch and combine of ranks that share the memory of a machine. Each rank writes its rows to the places
// where their receivers have them in the end. Sums return through the chunks of the lane, which stay in the
// cache.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "host/backend.hpp"
#include "host/move.hpp"
#include "moe/arrays.hpp"
#include "moe/engine.hpp"
#include "moe/sent_row.hpp"
#include "moe/told.hpp"
#include "programs/all_gather.hpp"

namespace unisono::moe {
namespace {

constexpr std::uint32_t kMark = 4;  // of what ranks tell each other, beside those of LocalCommunicator

class HostEngine final : public Engine {
 public:
  HostEngine(Communicator::Impl& impl, const Dims& dims)
      : impl_(impl),
        group_(impl.machine()->group()),
        lane_(group_.lane()),
        dims_(dims),
        places_(dims),
        memory_(impl.allocate(places_.bytes, Memory::host)),
        parts_(impl.parts_of(memory_.get())),
        arrays_(dims_, places_, part(dims.rank)),
        told_(dims),
        row_(dims) {}

  void begin_dispatch(const MoeTokens& tokens, int slot, bool routed, bool) override;
  void end_dispatch(MoeReceived& received) override;
  void begin_combine(const MoeOutputs& outputs, int slot, bool) override;
  void end_combine() override {}

 private:
  // A step of a combine: some tokens of each rank, and the same bytes of each of their rows.
  struct Window {
    std::size_t first_token, end_token, begin, bytes;
  };

  void meet(const MoeTokens& tokens, int slot, bool routed);
  void push(const MoeTokens& tokens, int slot, bool routed);
  void push_row(const MoeTokens& tokens, std::size_t token);
  void push_meta(const MoeTokens& tokens, std::size_t token, const Route::Hop& hop, int slot, bool routed);
  void copy_to(std::size_t offset, std::size_t width, const byte* from);

  void give(const Window& window, const MoeOutputs& outputs);
  void take(const Window& window, const MoeOutputs& outputs);
  void reduce(const Dst& to, const MoeOutputs& outputs, std::size_t token_row, const Window& window);

  byte* part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }

  Communicator::Impl& impl_;
  Group& group_;
  HostThread& lane_;
  const Dims dims_;
  const Places places_;
  std::shared_ptr<void> memory_;
  std::vector<byte*> parts_;
  Arrays arrays_;
  Told told_;

  // of the phase that has begun
  int slot_ = 0;
  void* out_ = nullptr;
  bool stream_ = false;
  SentRow row_;
  struct Target {
    int rank;
    std::size_t row;
  };
  std::vector<Target> targets_;  // of the row that goes
  std::vector<Dst> dsts_;
  std::vector<const byte*> sums_;
  std::vector<std::size_t> next_;    // of each source rank: its next token row to be given
  std::vector<const byte*> pieces_;  // of each rank: what has come of the window, from the next row on
  std::vector<std::size_t> counts_;  // and how many rows those are
  std::vector<byte> own_;            // expert_major: this rank's sums for its own tokens of a window
};

void HostEngine::begin_dispatch(const MoeTokens& tokens, int slot, bool routed, bool /*whole*/) {
  slot_ = slot;
  out_ = tokens.out;
  if (routed) arrays_.route(slot).check_same(tokens);
  else arrays_.route(slot).read(tokens);
  meet(tokens, slot, routed);
  arrays_.begin(tokens, slot, told_.weighted());
  push(tokens, slot, routed);
  for (int i = 1; i < dims_.ranks; ++i) lane_.signal(peer_at(lane_, i), unisono::Slot::meet);
}

// Tells every rank what this rank sends. Nobody reads the memory of this epoch any more once all have told.
void HostEngine::meet(const MoeTokens& tokens, int slot, bool routed) {
  Route& route = arrays_.route(slot);
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
  const Route& route = arrays_.route(slot);
  const std::size_t bytes = arrays_.x_bytes() * tokens.tokens * static_cast<std::size_t>(dims_.ranks);
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
  row_.take(tokens, token);
  copy_to(places_.x(arrays_.epoch()), arrays_.x_bytes(), row_.data());
  copy_to(places_.scales(arrays_.epoch()), dims_.scale_bytes, row_.scales());
  for (std::size_t m = 0; m < tokens.more.size(); ++m)
    copy_to(places_.more(arrays_.epoch(), arrays_.widths(), m), tokens.more[m].row_bytes,
            static_cast<const byte*>(tokens.more[m].data) + token * tokens.more[m].row_bytes);
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
  const Route& route = arrays_.route(slot);
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
  Route& route = arrays_.route(slot_);
  route.sort(arrays_.idx(slot_));
  byte* const x = arrays_.x();
  arrays_.finish(x, received);
  if (!out_) return;
  auto* const out = static_cast<byte*>(out_);
  received.x = out;
  if (dims_.layout != MoeLayout::rank_major) {
    std::memcpy(out, x, at(route.rows) * arrays_.x_bytes());
    return;
  }
  for (int s = 0; s < dims_.ranks; ++s) {
    const std::size_t first = route.first_from(s) * arrays_.x_bytes();
    std::memcpy(out + first, x + first, route.received_from(s) * arrays_.x_bytes());
  }
}

void HostEngine::begin_combine(const MoeOutputs& outputs, int slot, bool /*whole*/) {
  slot_ = slot;
  const Route& route = arrays_.route(slot);
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
  const Route& route = arrays_.route(slot_);
  const auto* const token_of = arrays_.token(slot_);
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
void HostEngine::reduce(const Dst& to, const MoeOutputs& outputs, std::size_t token_row,
                        const Window& window) {
  if (dims_.expert_major())
    return arrays_.sum(to.at, outputs, slot_, token_row, {window.begin, window.bytes});
  const byte* const from = static_cast<const byte*>(outputs.y) + token_row * outputs.row_bytes + window.begin;
  lane_.move(&to, 1, &from, 1, window.bytes);
}

// Sums what has come for this rank's own tokens in the window.
void HostEngine::take(const Window& window, const MoeOutputs& outputs) {
  const Route& route = arrays_.route(slot_);
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
