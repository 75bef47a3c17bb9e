// Dispatch and combine by messages, for ranks that do not share one machine's memory.
//
// A dispatch sends a token once to each node that has an expert of it. A rank has one message for each node,
// with its tokens' rows of x, then their scales, further payloads, experts and weights. That for its own node
// it leaves in memory that the node's ranks share. Its counterpart on another node receives the message into
// such memory. Every rank of the node takes its rows from there. A combine has a message for each pair of
// ranks of different nodes, with a sum for each token: sums of sums would have other bits.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "host/move.hpp"
#include "moe/arrays.hpp"
#include "moe/engine.hpp"
#include "moe/message.hpp"
#include "moe/private_memory.hpp"
#include "moe/sent_row.hpp"
#include "moe/site.hpp"
#include "moe/told.hpp"

namespace unisono::moe {
namespace {

// Keeps memory of messages that are not over to the end of the process: the transport may still reach it.
void keep(PrivateMemory memory, std::shared_ptr<void> shared) {
  static auto& kept = *new std::vector<std::pair<PrivateMemory, std::shared_ptr<void>>>;
  static std::mutex keeping;
  const std::scoped_lock lock(keeping);
  kept.emplace_back(std::move(memory), std::move(shared));
}

class MessageEngine final : public Engine {
 public:
  MessageEngine(Communicator::Impl& impl, const Dims& dims)
      : impl_(impl),
        dims_(dims),
        places_(dims),
        site_(impl),
        memory_(allocated(impl, places_.bytes,
                          places_.bytes + most_sent() + most_landed() + (shares() ? 0 : most_shared()))),
        arrays_(dims_, places_, memory_.get()),
        told_(dims, at(site_.nodes())),
        sent_(at(site_.nodes())),
        came_(at(dims.ranks)),
        sums_(at(dims.ranks)),
        row_(dims) {
    if (shares()) {
      shared_ = impl.allocate(most_shared(), Memory::host);
      parts_ = impl.parts_of(shared_.get());
    } else {
      parts_ = {landed() + most_landed()};
    }
  }
  ~MessageEngine() override {
    if (under_way_) keep(std::move(memory_), std::move(shared_));
  }

  void begin_dispatch(const MoeTokens& tokens, int slot, bool routed, bool) override;
  void end_dispatch(MoeReceived& received) override;
  void begin_combine(const MoeOutputs& outputs, int slot, bool) override;
  void end_combine() override;

 private:
  bool shares() const { return site_.most_neighbours() > 1; }
  // The most bytes of a message of a dispatch.
  std::size_t most_message() const { return round_up(dims_.max_tokens * Message::most_bytes(dims_), kAlign); }
  // The sums for a neighbour, at most.
  std::size_t most_sums() const { return round_up(dims_.max_tokens * dims_.row_bytes, kAlign); }
  std::size_t most_sent() const {
    const std::size_t sums = dims_.expert_major() ? dims_.tokens_held * dims_.row_bytes : 0;
    return round_up(std::max(at(std::min(dims_.top_k, site_.nodes() - 1)) * most_message(), sums), kAlign);
  }
  std::size_t most_landed() const { return at(std::min(dims_.top_k, dims_.ranks)) * most_sums(); }
  // Shared: of a dispatch the message to this node, then those from others that this rank takes; then the
  // sums for each neighbour, of two combines in turn. A rank that writes them again has met its neighbours
  // since they read them, as the ranks told each other of a dispatch, or in the combine between.
  std::size_t most_messages() const { return (1 + site_.most_taken()) * most_message(); }
  std::size_t most_shared() const { return most_messages() + 2 * site_.most_neighbours() * most_sums(); }
  byte* sums(int from, int to) const {
    const std::size_t place = at(turn_) * site_.most_neighbours() + site_.number(to);
    return part(from) + most_messages() + place * most_sums();
  }
  byte* sent() const { return memory_.get() + places_.bytes; }
  byte* landed() const { return sent() + most_sent(); }
  byte* part(int rank) const { return parts_[site_.number(rank)]; }

  void meet(const MoeTokens& tokens);
  void find_targets(std::size_t token);
  void lay_out();
  void pack(const MoeTokens& tokens);
  void put(std::size_t part, const void* row);
  void exchange_dispatch();
  void wait();
  void find_rows();
  void unpack_weights();
  void unpack_rows(std::size_t part, byte* array);
  const byte* row(int source, std::size_t part, std::size_t token_row) const;
  const byte* give(int rank, byte* to);
  void sum();

  Communicator::Impl& impl_;
  const Dims dims_;
  const Places places_;
  const Site site_;
  PrivateMemory memory_;
  std::shared_ptr<void> shared_;  // null: no rank has a neighbour
  std::vector<byte*> parts_;      // of it, by the ranks' numbers on the node
  Arrays arrays_;
  Told told_;

  // of the phase that has begun
  int slot_ = 0;
  bool routed_ = false;
  byte* out_ = nullptr;
  Message message_;
  std::vector<Args::Part> sent_;  // the message to each node
  struct Came {
    const byte* at;
    std::size_t tokens;
  };
  std::vector<Came> came_;  // the message of each rank to this node
  MoeOutputs outputs_;
  int turn_ = 0;                   // of a combine's sums
  std::vector<const byte*> sums_;  // of each rank for this rank's tokens
  std::unique_ptr<Communicator::Impl::Exchange> under_way_;

  struct Target {
    int node;
    std::int32_t index;  // of the token in the message
  };
  std::vector<Target> targets_;         // of the token that goes
  std::vector<std::int32_t> crossing_;  // tokens to each node so far
  SentRow row_;
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
  lay_out();
  pack(tokens);
  exchange_dispatch();
}

// Tells every rank what this rank sends. Nobody reads the messages of the dispatch before any more.
void MessageEngine::meet(const MoeTokens& tokens) {
  Route& route = arrays_.route(slot_);
  told_.tell(tokens, slot_, routed_, route);
  crossing_.assign(at(site_.nodes()), 0);
  for (std::size_t t = 0; t < tokens.tokens; ++t) find_targets(t);
  std::copy(crossing_.begin(), crossing_.end(), told_.more().begin());
  const Call call{.in = told_.mine(), .out = told_.all(), .count = told_.bytes(), .dtype = DType::u8};
  impl_.run_within({Collective::all_gather, call, dims_.rank, dims_.ranks});
  told_.compare(impl_);
  if (!routed_) route.lay_out(told_.numbers(), told_.stride());
}

// Finds the nodes of a token, also those where it will be dropped, and its numbers there.
void MessageEngine::find_targets(std::size_t token) {
  targets_.clear();
  for (const Route::Hop& hop : arrays_.route(slot_).hops(token)) {
    const int node = site_.node_of(hop.rank);
    const auto same = [&](const Target& target) { return target.node == node; };
    if (std::none_of(targets_.begin(), targets_.end(), same))
      targets_.push_back({node, crossing_[at(node)]++});
  }
}

// Finds the place of the message to each node, and of each rank's message to this node.
void MessageEngine::lay_out() {
  const std::size_t width = message_.token_bytes();
  byte* to = sent();
  for (int n = 0; n < site_.nodes(); ++n) {
    const std::size_t bytes = at(crossing_[at(n)]) * width;
    const bool home = n == site_.home();
    sent_[at(n)] = {home ? part(dims_.rank) : to, bytes};
    if (!home) to += bytes;
  }
  std::vector<byte*> next = parts_;
  for (byte*& one : next) one += most_message();
  for (int r = 0; r < dims_.ranks; ++r) {
    const std::size_t tokens = at(told_.more_of(r)[at(site_.home())]);
    if (site_.is_home(r)) {
      came_[at(r)] = {part(r), tokens};
      continue;
    }
    byte*& landing = next[site_.counterpart(r, site_.home())];
    came_[at(r)] = {landing, tokens};
    landing += tokens * width;
  }
}

void MessageEngine::pack(const MoeTokens& tokens) {
  const Route& route = arrays_.route(slot_);
  std::fill(crossing_.begin(), crossing_.end(), 0);
  for (std::size_t t = 0; t < tokens.tokens; ++t) {
    find_targets(t);
    if (targets_.empty()) continue;
    row_.take(tokens, t);
    put(Message::kX, row_.data());
    put(Message::kScales, row_.scales());
    for (std::size_t m = 0; m < tokens.more.size(); ++m)
      put(Message::more(m), static_cast<const byte*>(tokens.more[m].data) + t * tokens.more[m].row_bytes);
    put(message_.idx(), route.experts(t));
    if (tokens.weights) put(message_.weights(), tokens.weights + t * at(dims_.top_k));
  }
}

// Copies a row to its part of all its messages.
void MessageEngine::put(std::size_t part, const void* row) {
  const std::size_t width = message_.width(part);
  if (width == 0) return;
  for (const Target& target : targets_) {
    const std::size_t tokens = at(told_.more_of(dims_.rank)[at(target.node)]);
    std::memcpy(sent_[at(target.node)].at + message_.begin(part, tokens) + at(target.index) * width, row,
                width);
  }
}

void MessageEngine::exchange_dispatch() {
  std::vector<Communicator::Outgoing> sends;
  std::vector<Communicator::Incoming> receives;
  for (int n = 0; n < site_.nodes(); ++n)
    if (const Args::Part& one = sent_[at(n)]; n != site_.home() && one.bytes > 0)
      sends.push_back({one.at, one.bytes, site_.rank_at(n, site_.counterpart(dims_.rank, n))});
  for (int r = 0; r < dims_.ranks; ++r)
    if (const Came& one = came_[at(r)];
        one.tokens > 0 && !site_.is_home(r) && site_.counterpart(r, site_.home()) == site_.number(dims_.rank))
      receives.push_back({const_cast<byte*>(one.at), one.tokens * message_.token_bytes(), r});
  under_way_ = impl_.begin_exchange(sends, receives);
}

// Waits until all that comes to this node is there.
void MessageEngine::wait() {
  if (under_way_) under_way_->wait();
  under_way_.reset();
  impl_.meet_node();
}

void MessageEngine::end_dispatch(MoeReceived& received) {
  wait();
  if (!routed_) find_rows();
  if (told_.weighted()) unpack_weights();
  if (!routed_) arrays_.route(slot_).sort(arrays_.idx(slot_));
  unpack_rows(Message::kX, out_);
  unpack_rows(Message::kScales, arrays_.scales());
  for (std::size_t m = 0; m < arrays_.widths().size(); ++m) unpack_rows(Message::more(m), arrays_.more(m));
  arrays_.finish(out_, received);
}

// Finds this rank's tokens in the messages by their experts.
void MessageEngine::find_rows() {
  const Route& route = arrays_.route(slot_);
  const std::size_t k = at(dims_.top_k);
  for (int r = 0; r < dims_.ranks; ++r) {
    const Came& from = came_[at(r)];
    const byte* experts = from.at + message_.begin(message_.idx(), from.tokens);
    std::size_t row = route.first_from(r);
    const std::size_t end = row + route.received_from(r);
    for (std::size_t i = 0; i < from.tokens && row < end; ++i, experts += k * sizeof(std::int32_t)) {
      std::int32_t* const idx = arrays_.idx(slot_) + row * k;
      std::memcpy(idx, experts, k * sizeof *idx);
      for (std::size_t p = 0; p < k; ++p)
        idx[p] = idx[p] >= 0 && dims_.rank_of(idx[p]) == dims_.rank ? idx[p] - dims_.first_expert() : -1;
      if (std::all_of(idx, idx + k, [](std::int32_t one) { return one < 0; })) continue;
      arrays_.token(slot_)[row++] = static_cast<std::int32_t>(i);
    }
  }
}

// Returns where a part of a token row has come.
const byte* MessageEngine::row(int source, std::size_t part, std::size_t token_row) const {
  const Came& from = came_[at(source)];
  return from.at + message_.begin(part, from.tokens) +
         at(arrays_.token(slot_)[token_row]) * message_.width(part);
}

void MessageEngine::unpack_weights() {
  const Route& route = arrays_.route(slot_);
  const std::size_t k = at(dims_.top_k);
  for (int r = 0; r < dims_.ranks; ++r)
    for (std::size_t t = route.first_from(r); t < route.first_from(r) + route.received_from(r); ++t) {
      float* const weights = arrays_.weights(slot_) + t * k;
      std::memcpy(weights, row(r, message_.weights(), t), k * sizeof *weights);
      for (std::size_t p = 0; p < k; ++p)
        if (arrays_.idx(slot_)[t * k + p] < 0) weights[p] = 0;
    }
}

// Copies a part of this rank's rows to an array of received rows.
void MessageEngine::unpack_rows(std::size_t part, byte* array) {
  const Route& route = arrays_.route(slot_);
  const std::size_t width = message_.width(part), k = at(dims_.top_k);
  if (width == 0) return;
  for (int r = 0; r < dims_.ranks; ++r)
    for (std::size_t t = route.first_from(r); t < route.first_from(r) + route.received_from(r); ++t) {
      const byte* const from = row(r, part, t);
      if (!dims_.expert_major()) {
        std::memcpy(array + t * width, from, width);
        continue;
      }
      for (std::size_t i = t * k; i < (t + 1) * k; ++i)
        if (route.pair_rows[i] != Route::kDropped)
          std::memcpy(array + at(route.pair_rows[i]) * width, from, width);
    }
}

void MessageEngine::begin_combine(const MoeOutputs& outputs, int slot, bool /*whole*/) {
  slot_ = slot;
  outputs_ = outputs;
  turn_ = 1 - turn_;
  const Route& route = arrays_.route(slot);
  const std::size_t width = outputs.row_bytes;
  std::vector<Communicator::Outgoing> sends;
  std::vector<Communicator::Incoming> receives;
  byte *to = sent(), *from = landed();
  for (int r = 0; r < dims_.ranks; ++r) {
    if (site_.is_home(r)) continue;
    const std::size_t there = route.received_from(r) * width, here = route.sent_to(r) * width;
    if (there > 0) sends.push_back({give(r, to), there, r});
    if (here > 0) receives.push_back({from, here, r});
    sums_[at(r)] = from;
    to += dims_.expert_major() ? there : 0;
    from += here;
  }
  under_way_ = impl_.begin_exchange(sends, receives);
  for (const int r : site_.neighbours()) {
    byte* const place = sums(dims_.rank, r);
    const byte* const given = give(r, place);
    sums_[at(r)] = r == dims_.rank ? given : sums(r, dims_.rank);
    if (r != dims_.rank && given != place) std::memcpy(place, given, route.received_from(r) * width);
  }
}

// Returns this rank's sums for a rank's tokens: the caller's rows, or with expert_major sums of them at `to`.
const byte* MessageEngine::give(int rank, byte* to) {
  const Route& route = arrays_.route(slot_);
  const std::size_t first = route.first_from(rank), width = outputs_.row_bytes;
  if (!dims_.expert_major()) return static_cast<const byte*>(outputs_.y) + first * width;
  for (std::size_t i = 0; i < route.received_from(rank); ++i)
    arrays_.sum(to + i * width, outputs_, slot_, first + i, {0, width});
  return to;
}

void MessageEngine::end_combine() {
  wait();
  sum();
}

// Sums what has come for this rank's own tokens.
void MessageEngine::sum() {
  const Route& route = arrays_.route(slot_);
  const std::size_t width = outputs_.row_bytes;
  const auto weigh = host::kernels().rows.weigh[static_cast<int>(outputs_.dtype)];
  for (std::size_t t = 0; t < route.tokens(); ++t) {
    rows_.clear();
    for (const Route::Hop& hop : route.hops(t))
      if (route.received(hop)) rows_.push_back(sums_[at(hop.rank)] + at(hop.index) * width);
    if (outputs_.bias) rows_.push_back(static_cast<const byte*>(outputs_.bias) + t * width);
    byte* const out = static_cast<byte*>(outputs_.out) + t * width;
    if (rows_.empty()) std::memset(out, 0, width);
    else weigh(out, rows_.data(), nullptr, static_cast<int>(rows_.size()), width / size_of(outputs_.dtype));
  }
}

}  // namespace

std::unique_ptr<Engine> make_message_engine(Communicator::Impl& impl, const Dims& dims) {
  return std::make_unique<MessageEngine>(impl, dims);
}

}  // namespace unisono::moe
