// Dispatch and combine by messages of the communicator, for ranks that do not share one machine's memory: one
// message for each pair of ranks in either phase. A message of a dispatch has its tokens' rows of x, then
// their scales, further payloads, experts and weights. A message of a combine has a sum for each token.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/allocation.hpp"
#include "host/move.hpp"
#include "host/segment.hpp"
#include "moe/arrays.hpp"
#include "moe/engine.hpp"
#include "moe/sent_row.hpp"
#include "moe/told.hpp"

namespace unisono::moe {
namespace {

// The ranks, for AllocationAgreement.
struct Ranks {
  Communicator::Impl& impl;
  int rank() const { return impl.rank(); }
  int number(int rank) const { return impl.number(rank); }
  [[noreturn]] void fail(FailureKind kind, const std::string& text) const {
    impl.fail({kind, text});
    raise({kind, text});
  }
  template <class T>
  std::vector<T> exchange(const T& mine) const {
    std::vector<T> all(at(impl.size()), mine);
    const Call call{.in = &mine, .out = all.data(), .count = sizeof mine, .dtype = DType::u8};
    impl.run_within({Collective::all_gather, call, impl.rank(), impl.size()});
    return all;
  }
};

// Memory for what messages may bring at most. The machine gives a page when a call first writes there, so
// that few tokens take little of it.
using Memory = std::unique_ptr<byte, decltype(&std::free)>;
Memory allocated(Communicator::Impl& impl, std::size_t received, std::size_t bytes) {
  Memory memory(nullptr, std::free);
  impl.turn("moe", [&] {
    Ranks ranks{impl};
    AllocationAgreement agreement(ranks, bytes, "memory of a moe");
    agreement.attempt([&] {
      check_room(received);
      memory.reset(static_cast<byte*>(std::aligned_alloc(4096, round_up(bytes, 4096))));
      if (!memory) throw ResourceError("the system refuses so many bytes.");
    });
    agreement.meet();
  });
  return memory;
}

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

class MessageEngine final : public Engine {
 public:
  MessageEngine(Communicator::Impl& impl, const Dims& dims)
      : impl_(impl),
        dims_(dims),
        places_(dims),
        memory_(allocated(impl, places_.bytes, places_.bytes + most_sent() + most_landed())),
        arrays_(dims_, places_, memory_.get()),
        told_(dims),
        sent_(at(dims.ranks)),
        landed_(at(dims.ranks)),
        row_(dims) {}

  void begin_dispatch(const MoeTokens& tokens, int slot, bool routed, bool) override;
  void end_dispatch(MoeReceived& received) override;
  void begin_combine(const MoeOutputs& outputs, int slot, bool) override;
  void end_combine() override {}

 private:
  // The most tokens that this rank sends to others, each rank of a token counted, and receives sums of.
  std::size_t most_hops() const { return dims_.max_tokens * at(std::min(dims_.top_k, dims_.ranks)); }
  std::size_t most_sent() const {
    const std::size_t sums = dims_.expert_major() ? dims_.tokens_held * dims_.row_bytes : 0;
    return round_up(std::max(most_hops() * Message::most_bytes(dims_), sums), kAlign);
  }
  std::size_t most_landed() const {
    const bool packed = dims_.layout == MoeLayout::flat;
    const std::size_t tokens = packed ? dims_.capacity : dims_.tokens_held;
    return round_up(std::max(tokens * Message::most_bytes(dims_), most_hops() * dims_.row_bytes), kAlign);
  }
  byte* sent() const { return memory_.get() + places_.bytes; }
  byte* landed() const { return sent() + most_sent(); }

  void meet(const MoeTokens& tokens);
  void lay_out(std::size_t width, bool back);
  void exchange();
  void pack(const MoeTokens& tokens);
  void pack_row(const MoeTokens& tokens, std::size_t token);
  void put(std::size_t part, const void* row);
  void unpack(std::size_t part, byte* array);
  void unpack_rows(std::size_t part, byte* array);
  void sum(const MoeOutputs& outputs);

  Communicator::Impl& impl_;
  const Dims dims_;
  const Places places_;
  Memory memory_;
  Arrays arrays_;
  Told told_;
  // The message to each rank, and from each. Of this rank's own both are one place, and nothing is sent.
  std::vector<Args::Part> sent_, landed_;

  // of the phase that has begun
  int slot_ = 0;
  bool routed_ = false;
  byte* out_ = nullptr;
  Message message_;
  struct Target {
    int rank;
    std::size_t index;
  };
  std::vector<Target> targets_;  // of the row that goes
  SentRow row_;
  std::vector<std::int32_t> experts_;
  std::vector<float> weights_;
  std::vector<const byte*> rows_;  // of a sum
};

void MessageEngine::begin_dispatch(const MoeTokens& tokens, int slot, bool routed, bool /*whole*/) {
  slot_ = slot;
  routed_ = routed;
  Route& route = arrays_.route(slot);
  if (routed) route.check_same(tokens);
  else route.read(tokens);
  meet(tokens);
  arrays_.begin(tokens, slot, told_.weighted());
  out_ = tokens.out ? static_cast<byte*>(tokens.out) : arrays_.x();
  message_ = Message(dims_, arrays_.x_bytes(), arrays_.widths(), routed, told_.weighted());
  lay_out(message_.token_bytes(), false);
  pack(tokens);
  exchange();
}

// Tells every rank what this rank sends.
void MessageEngine::meet(const MoeTokens& tokens) {
  Route& route = arrays_.route(slot_);
  told_.tell(tokens, slot_, routed_, route);
  const Call call{.in = told_.mine(), .out = told_.all(), .count = told_.bytes(), .dtype = DType::u8};
  impl_.run_within({Collective::all_gather, call, dims_.rank, dims_.ranks});
  told_.compare(impl_);
  if (!routed_) route.lay_out(told_.numbers(), told_.stride());
}

// Finds each message's place. back: they bring sums of what a dispatch has brought. width: bytes of a token.
void MessageEngine::lay_out(std::size_t width, bool back) {
  const Route& route = arrays_.route(slot_);
  byte *to = sent(), *from = landed();
  for (int r = 0; r < dims_.ranks; ++r) {
    const std::size_t there = route.sent_to(r) * width, here = route.received_from(r) * width;
    const Args::Part landing{from, back ? there : here};
    from += landing.bytes;
    landed_[at(r)] = landing;
    if (r == dims_.rank) {
      sent_[at(r)] = landing;
      continue;
    }
    sent_[at(r)] = {to, back ? here : there};
    to += sent_[at(r)].bytes;
  }
}

void MessageEngine::exchange() {
  std::vector<Communicator::Outgoing> sends;
  std::vector<Communicator::Incoming> receives;
  for (int r = 0; r < dims_.ranks; ++r) {
    const Args::Part &to = sent_[at(r)], &from = landed_[at(r)];
    if (r != dims_.rank && to.bytes > 0) sends.push_back({to.at, to.bytes, r});
    if (r != dims_.rank && from.bytes > 0) receives.push_back({from.at, from.bytes, r});
  }
  const Call call{.dtype = DType::u8};
  impl_.run_within({call, dims_.rank, dims_.ranks, sends, receives});
}

void MessageEngine::pack(const MoeTokens& tokens) {
  const Route& route = arrays_.route(slot_);
  const std::size_t k = at(dims_.top_k);
  std::vector<Target> targets;
  for (std::size_t t = 0; t < tokens.tokens; ++t) {
    targets.clear();
    for (const Route::Hop& hop : route.hops(t)) {
      if (!route.received(hop)) continue;
      targets.push_back({hop.rank, at(hop.index)});
      targets_.assign(1, targets.back());
      experts_.assign(k, -1);
      weights_.assign(k, 0.0f);
      for (const Route::Pair& pair : route.pairs(hop)) {
        experts_[at(pair.place)] = pair.expert;
        if (tokens.weights) weights_[at(pair.place)] = tokens.weights[t * k + at(pair.place)];
      }
      put(message_.idx(), experts_.data());
      put(message_.weights(), weights_.data());
    }
    targets_.swap(targets);
    if (!targets_.empty()) pack_row(tokens, t);
    targets_.swap(targets);
  }
}

void MessageEngine::pack_row(const MoeTokens& tokens, std::size_t token) {
  row_.take(tokens, token);
  put(Message::kX, row_.data());
  put(Message::kScales, row_.scales());
  for (std::size_t m = 0; m < tokens.more.size(); ++m)
    put(Message::more(m), static_cast<const byte*>(tokens.more[m].data) + token * tokens.more[m].row_bytes);
}

// Copies a row to its part of all its messages.
void MessageEngine::put(std::size_t part, const void* row) {
  const Route& route = arrays_.route(slot_);
  const std::size_t width = message_.width(part);
  if (width == 0) return;
  for (const Target& target : targets_)
    std::memcpy(
        sent_[at(target.rank)].at + message_.begin(part, route.sent_to(target.rank)) + target.index * width,
        row, width);
}

void MessageEngine::end_dispatch(MoeReceived& received) {
  Route& route = arrays_.route(slot_);
  unpack(message_.idx(), reinterpret_cast<byte*>(arrays_.idx(slot_)));
  unpack(message_.weights(), reinterpret_cast<byte*>(arrays_.weights(slot_)));
  if (!routed_) route.sort(arrays_.idx(slot_));
  unpack_rows(Message::kX, out_);
  unpack_rows(Message::kScales, arrays_.scales());
  for (std::size_t m = 0; m < arrays_.widths().size(); ++m) unpack_rows(Message::more(m), arrays_.more(m));
  arrays_.finish(out_, received);
}

// Copies a part of all messages to an array of token rows.
void MessageEngine::unpack(std::size_t part, byte* array) {
  const Route& route = arrays_.route(slot_);
  const std::size_t width = message_.width(part);
  for (int r = 0; r < dims_.ranks; ++r) {
    const std::size_t tokens = route.received_from(r);
    if (tokens * width == 0) continue;
    std::memcpy(array + route.first_from(r) * width, landed_[at(r)].at + message_.begin(part, tokens),
                tokens * width);
  }
}

// The same to an array of received rows.
void MessageEngine::unpack_rows(std::size_t part, byte* array) {
  if (!dims_.expert_major()) return unpack(part, array);
  const Route& route = arrays_.route(slot_);
  const std::size_t width = message_.width(part), k = at(dims_.top_k);
  if (width == 0) return;
  for (int r = 0; r < dims_.ranks; ++r) {
    const std::size_t tokens = route.received_from(r);
    const byte* row = landed_[at(r)].at + message_.begin(part, tokens);
    for (std::size_t t = route.first_from(r); t < route.first_from(r) + tokens; ++t, row += width)
      for (std::size_t i = t * k; i < (t + 1) * k; ++i)
        if (route.pair_rows[i] != Route::kDropped)
          std::memcpy(array + at(route.pair_rows[i]) * width, row, width);
  }
}

void MessageEngine::begin_combine(const MoeOutputs& outputs, int slot, bool /*whole*/) {
  slot_ = slot;
  const Route& route = arrays_.route(slot);
  lay_out(outputs.row_bytes, true);
  for (int r = 0; r < dims_.ranks; ++r) {
    const std::size_t first = route.first_from(r), width = outputs.row_bytes;
    if (dims_.expert_major()) {
      for (std::size_t i = 0; i < route.received_from(r); ++i)
        arrays_.sum(sent_[at(r)].at + i * width, outputs, slot, first + i, {0, width});
      continue;
    }
    // the caller's rows are the sums, in the order of the message
    sent_[at(r)].at = static_cast<byte*>(const_cast<void*>(outputs.y)) + first * width;
    if (r == dims_.rank) landed_[at(r)].at = sent_[at(r)].at;
  }
  exchange();
  sum(outputs);
}

// Sums what has come for this rank's own tokens.
void MessageEngine::sum(const MoeOutputs& outputs) {
  const Route& route = arrays_.route(slot_);
  const std::size_t width = outputs.row_bytes;
  const auto weigh = host::kernels().rows.weigh[static_cast<int>(outputs.dtype)];
  for (std::size_t t = 0; t < route.tokens(); ++t) {
    rows_.clear();
    for (const Route::Hop& hop : route.hops(t))
      if (route.received(hop)) rows_.push_back(landed_[at(hop.rank)].at + at(hop.index) * width);
    if (outputs.bias) rows_.push_back(static_cast<const byte*>(outputs.bias) + t * width);
    byte* const out = static_cast<byte*>(outputs.out) + t * width;
    if (rows_.empty()) std::memset(out, 0, width);
    else weigh(out, rows_.data(), nullptr, static_cast<int>(rows_.size()), width / size_of(outputs.dtype));
  }
}

}  // namespace

std::unique_ptr<Engine> make_message_engine(Communicator::Impl& impl, const Dims& dims) {
  return std::make_unique<MessageEngine>(impl, dims);
}

}  // namespace unisono::moe
