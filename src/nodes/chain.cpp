#include "nodes/chain.hpp"

#include <algorithm>

namespace unisono::nodes {
namespace {

// Elements of a block of at most `bytes`, in whole shards of a node's ranks.
std::size_t block_of(std::size_t bytes, const Sum& what, int here, std::size_t count) {
  const std::size_t unit = static_cast<std::size_t>(here);
  return std::max(unit, std::min(bytes / what.item(), count) / unit * unit);
}

// Columns of a range of at most `bytes`.
std::size_t columns_of(std::size_t bytes, const Sum& what, int here, std::size_t count) {
  return std::min(std::max<std::size_t>(1, bytes / (what.item() * static_cast<std::size_t>(here))), count);
}

}  // namespace

Chain::Chain(Moves& moves, const Sum& what, int count, std::size_t elements)
    : moves_(moves),
      what_(what),
      count_(count),
      node_(moves.place.node),
      last_(moves.place.count() - 1),
      here_(moves.place.here()) {
  if (node_ > 0) before_ = moves.place.counterpart(node_ - 1);
  if (node_ < last_) behind_ = moves.place.counterpart(node_ + 1);
  auto scratch = [&](Scratch purpose, int slot, std::size_t item) {
    return moves.space.scratch(purpose, slot, elements * item);
  };
  for (int i = 0; i < 2; ++i) incoming_[i] = scratch(Scratch::incoming, i, what.wide());
  for (int i = 0; i < 2; ++i) partial_[i] = scratch(Scratch::partial, i, what.wide());
  for (int i = 0; i < 3; ++i) final_[i] = scratch(Scratch::final, i, what.item());
}

void Chain::run() {
  const std::size_t wide = what_.wide();
  for (int step = 0; step < count_ + 4 * last_; ++step) {
    const int adding = step - 2 * node_;
    Messages messages;
    sums_travel(step, messages);
    if (behind_ >= 0 && exists(adding - 1))
      messages.send(behind_, shard(partial_, 2, adding - 1), elements(adding - 1) * wide);
    if (before_ >= 0 && exists(adding + 1))
      messages.receive(before_, shard(incoming_, 2, adding + 1), elements(adding + 1) * wide);
    auto under_way = moves_.exchange(messages);
    if (exists(adding)) add(adding);
    land(step);
    under_way.wait();
  }
}

void Chain::add(int block) {
  Rows rows = sources(block);
  const byte* prior = node_ > 0 ? shard(incoming_, 2, block) : nullptr;
  if (prior && what_.exact()) {
    rows.insert(rows.begin(), prior);
    prior = nullptr;
  }
  const bool rounds = node_ == last_;
  byte* out = rounds ? sums(block) : shard(partial_, 2, block);
  moves_.space.combine(
      {out, prior, rows, elements(block), what_.dtype, what_.op, rounds || what_.exact() ? what_.ranks : 0});
}

byte* Chain::sums(int block) { return shard(final_, 3, block); }

void Chain::send_sums(Messages& messages, int rank, int block) {
  if (exists(block)) messages.send(rank, sums(block), elements(block) * what_.item());
}

void Chain::receive_sums(Messages& messages, int rank, int block) {
  if (exists(block)) messages.receive(rank, sums(block), elements(block) * what_.item());
}

AllReduceChain::AllReduceChain(Moves& moves, const Sum& what, std::size_t block_bytes, const byte* x,
                               byte* out, std::size_t count)
    : Chain(moves, what,
            static_cast<int>(divide_up(count, block_of(block_bytes, what, moves.place.here(), count))),
            block_of(block_bytes, what, moves.place.here(), count) /
                static_cast<std::size_t>(moves.place.here())),
      x_(x),
      out_(out),
      total_(count),
      block_(block_of(block_bytes, what, moves.place.here(), count)) {}

std::size_t AllReduceChain::elements(int block) const {
  return divide_up(length(block), static_cast<std::size_t>(here_));
}

Chain::Rows AllReduceChain::sources(int block) {
  const std::size_t n = elements(block) * what_.item(), whole = n * static_cast<std::size_t>(here_);
  const std::size_t bytes = length(block) * what_.item();
  const byte* given = x_ + begin(block) * what_.item();
  if (bytes < whole) {
    byte* longer = moves_.space.scratch(Scratch::padded, 0, whole);
    moves_.space.copy(longer, given, bytes);
    given = longer;
  }
  if (here_ == 1) return {given};
  byte* staged = moves_.space.scratch(Scratch::everyones, 0, whole);
  moves_.inside(Collective::all_to_all, given, staged, n);
  Rows rows;
  for (int r = 0; r < here_; ++r) rows.push_back(staged + static_cast<std::size_t>(r) * n);
  return rows;
}

void AllReduceChain::sums_travel(int step, Messages& messages) {
  const int landing = step - 2 * (2 * last_ - node_);  // node k hands out this block
  if (before_ >= 0) send_sums(messages, before_, landing - 1);
  if (behind_ >= 0) receive_sums(messages, behind_, landing + 1);
}

void AllReduceChain::land(int step) {
  const int block = step - 2 * (2 * last_ - node_);
  if (exists(block)) hand_out(block, Collective::all_gather);
}

void AllReduceChain::hand_out(int block, Collective collective, int root) {
  const std::size_t n = elements(block) * what_.item(), bytes = length(block) * what_.item();
  byte* taken = out_ ? out_ + begin(block) * what_.item() : nullptr;
  byte* whole = taken;
  if (taken && bytes < n * static_cast<std::size_t>(here_))
    whole = moves_.space.scratch(Scratch::whole, 0, n * static_cast<std::size_t>(here_));
  moves_.inside(collective, sums(block), whole, n, root);
  if (taken) moves_.space.copy(taken, whole, bytes);
}

ReduceChain::ReduceChain(Moves& moves, const Sum& what, std::size_t block_bytes, const byte* x, byte* out,
                         std::size_t count, int root)
    : AllReduceChain(moves, what, block_bytes, x, out, count),
      home_(moves.place.home_of(root)),
      root_(static_cast<int>(std::find(moves.place.on(home_).begin(), moves.place.on(home_).end(), root) -
                             moves.place.on(home_).begin())) {}

void ReduceChain::sums_travel(int step, Messages& messages) {
  if (home_ == last_) return;
  const int block = step - 2 * last_ - 1;
  if (node_ == last_) send_sums(messages, moves_.place.counterpart(home_), block);
  if (node_ == home_) receive_sums(messages, moves_.place.counterpart(last_), block);
}

void ReduceChain::land(int step) {
  const int block = step - 2 * last_ - (home_ == last_ ? 0 : 2);
  if (node_ == home_ && exists(block)) hand_out(block, Collective::gather, root_);
}

ReduceScatterChain::ReduceScatterChain(Moves& moves, const Sum& what, std::size_t block_bytes, const byte* x,
                                       byte* out, std::size_t count)
    : Chain(moves, what,
            static_cast<int>(divide_up(count, columns_of(block_bytes, what, moves.place.here(), count))) *
                moves.place.count(),
            columns_of(block_bytes, what, moves.place.here(), count)),
      x_(x),
      out_(out),
      total_(count),
      columns_(columns_of(block_bytes, what, moves.place.here(), count)) {}

std::size_t ReduceScatterChain::elements(int block) const {
  return std::min(columns_, total_ - begin(block));
}

Chain::Rows ReduceScatterChain::sources(int block) {
  const std::size_t n = elements(block) * what_.item();
  const int me = moves_.place.local_rank, first = goal(block) * here_;
  byte* staged = moves_.space.scratch(Scratch::everyones, 0, n * static_cast<std::size_t>(here_));
  Rows rows;
  std::vector<Args::Part> sends(static_cast<std::size_t>(moves_.place.size())), receives = sends;
  for (int r = 0; r < here_; ++r) {
    const byte* given = x_ + (static_cast<std::size_t>(first + r) * total_ + begin(block)) * what_.item();
    byte* taken = staged + static_cast<std::size_t>(r) * n;
    rows.push_back(r == me ? given : taken);
    if (r == me) continue;
    const auto peer = static_cast<std::size_t>(moves_.place.local()[static_cast<std::size_t>(r)]);
    sends[peer] = {const_cast<byte*>(given), n};
    receives[peer] = {taken, n};
  }
  if (here_ > 1) moves_.batch(sends, receives);
  return rows;
}

byte* ReduceScatterChain::sums(int block) {
  const bool mine = goal(block) == node_;
  return mine ? out_ + begin(block) * what_.item() : Chain::sums(block);
}

void ReduceScatterChain::sums_travel(int step, Messages& messages) {
  const int block = step - 2 * last_ - 1;
  if (!exists(block) || goal(block) == last_) return;
  if (node_ == last_) send_sums(messages, moves_.place.counterpart(goal(block)), block);
  if (node_ == goal(block)) receive_sums(messages, moves_.place.counterpart(last_), block);
}

}  // namespace unisono::nodes
