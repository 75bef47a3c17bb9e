#include "nodes/sums.hpp"

#include <algorithm>
#include <deque>

#include "base/wire.hpp"
#include "host/move.hpp"
#include "nodes/chain.hpp"

namespace unisono::nodes {

bool Sum::exact() const {
  if (op == Op::min || op == Op::max) return true;
  const bool own_type =
      dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f8e4m3 && dtype != DType::f8e5m2;
  return op != Op::avg && own_type;
}

std::size_t Sum::wide() const {
  return exact() ? item() : host::kernels().wide_bytes[static_cast<int>(dtype)];
}

Algorithm choose(Collective collective, const Topology& place, const Limits& limits, std::size_t bytes,
                 double wide, int root) {
  const bool scattered = collective == Collective::reduce_scatter;
  const auto ranks = static_cast<std::size_t>(place.size());
  if (!scattered && (bytes * ranks <= limits.one_shot || ranks == 2)) return Algorithm::one_shot;
  if (bytes < limits.chain || !place.uniform()) return Algorithm::two_shot;
  // What the busiest node takes in, or sends, in multiples of an input. two_shot: of the inputs of other
  // nodes a shard for each of its ranks, and the sums except in a reduce_scatter. The chain: partial sums,
  // and the sums too on a node within the chain that gets them.
  const double here = place.here(), last = place.count() - 1;
  const double two_shot = (here + (scattered ? 0 : 1)) * last / (last + 1);
  if (collective == Collective::all_reduce)  // a chain keeps both directions busy, and copies less
    return wide + (last > 1 ? 1 : 0) <= two_shot ? Algorithm::chain : Algorithm::two_shot;
  double within = last > 1 ? 1 / (last + 1) : 0;
  if (collective == Collective::reduce)
    within = 0 < place.home_of(root) && place.home_of(root) < last ? 1 : 0;
  const auto steps = static_cast<double>(divide_up(bytes, limits.chain_block));
  const double late = (steps + 2 * last) / steps;  // each node begins 2 steps later than the one before
  return late * (wide + within) < two_shot ? Algorithm::chain : Algorithm::two_shot;
}

void Sums::all_reduce(const byte* x, byte* out, std::size_t count, const Sum& what, Algorithm algorithm) {
  if (algorithm == Algorithm::chain)
    return AllReduceChain(moves_, what, limits_.chain_block, x, out, count).run();
  const auto shots = algorithm == Algorithm::one_shot ? &Sums::one_shot : &Sums::two_shot;
  staggered([&](auto... block) { return (this->*shots)(what, block...); }, x, out, count, what);
}

void Sums::reduce(const byte* x, byte* out, std::size_t count, const Sum& what, int root,
                  Algorithm algorithm) {
  if (algorithm == Algorithm::chain)
    return ReduceChain(moves_, what, limits_.chain_block, x, out, count, root).run();
  const auto shots = algorithm == Algorithm::one_shot ? &Sums::at_root : &Sums::to_root;
  staggered([&](auto... block) { return (this->*shots)(what, root, block...); }, x, out, count, what);
}

void Sums::reduce_scatter(const byte* x, byte* out, std::size_t count, const Sum& what, Algorithm algorithm) {
  if (algorithm == Algorithm::chain)
    return ReduceScatterChain(moves_, what, limits_.chain_block, x, out, count).run();
  Rows rows;
  everyones_shards(x, count * what.item(), 0, rows).wait();
  combine(out, rows, count, what);
}

void Sums::quantised(const byte* x, byte* out, std::size_t count, const Sum& what) {
  staggered([&](auto... block) { return quantised_block(what, block...); }, x, out, count, what);
}

// Each block goes one step when the next has begun: one travels while another is combined. All blocks except
// the last can be cut into equal shards of whole wire blocks.
void Sums::staggered(const Step& step, const byte* x, byte* out, std::size_t count, const Sum& what) {
  const std::size_t item = what.item(), bytes = count * item, ranks = static_cast<std::size_t>(what.ranks);
  const std::size_t unit = wire::kBlock * item * ranks;
  const std::size_t block =
      std::max(std::max(limits_.shard * ranks, std::min(bytes / 2, limits_.block)) / unit, std::size_t{1}) *
      unit;
  std::deque<Steps> under_way;  // the newest first
  auto advance = [&] {
    for (auto one = under_way.begin(); one != under_way.end();)
      one = one->next() ? one + 1 : under_way.erase(one);
  };
  int slot = 0;
  for (std::size_t begin = 0; begin < bytes; begin += block, slot = 1 - slot) {
    under_way.push_front(
        step(slot, x + begin, out ? out + begin : nullptr, std::min(block, bytes - begin) / item));
    advance();
  }
  while (!under_way.empty()) advance();
}

byte* Sums::rows_of(int slot, std::size_t bytes, Rows& rows) {
  byte* staged =
      moves_.space.scratch(Scratch::everyones, slot, bytes * static_cast<std::size_t>(moves_.place.size()));
  for (int r = 0; r < moves_.place.size(); ++r) rows.push_back(staged + static_cast<std::size_t>(r) * bytes);
  return staged;
}

Moves::Begun Sums::everyones(const byte* x, std::size_t bytes, int slot, Rows& rows) {
  const Topology& place = moves_.place;
  byte* staged = rows_of(slot, bytes, rows);
  if (!place.apart()) return moves_.all_gather(x, staged, bytes);
  Messages messages;  // this rank's own is not copied
  for (const int rank : place.peers) {
    messages.send(rank, x, bytes);
    messages.receive(rank, staged + static_cast<std::size_t>(rank) * bytes, bytes);
  }
  rows[static_cast<std::size_t>(place.rank)] = x;
  return moves_.exchange(messages);
}

Moves::Begun Sums::everyones_at(const byte* x, std::size_t bytes, int slot, int root, Rows& rows) {
  const Topology& place = moves_.place;
  if (place.rank != root) return moves_.gather(x, nullptr, bytes, root);
  byte* staged = rows_of(slot, bytes, rows);
  if (!place.apart()) return moves_.gather(x, staged, bytes, root);
  Messages messages;
  for (const int rank : place.peers)
    messages.receive(rank, staged + static_cast<std::size_t>(rank) * bytes, bytes);
  rows[static_cast<std::size_t>(root)] = x;
  return moves_.exchange(messages);
}

Moves::Begun Sums::everyones_shards(const byte* x, std::size_t bytes, int slot, Rows& rows) {
  const Topology& place = moves_.place;
  byte* staged = rows_of(slot, bytes, rows);
  if (!place.apart()) return moves_.all_to_all(x, staged, bytes, slot);
  Messages messages;
  for (const int rank : place.peers) {
    messages.send(rank, x + static_cast<std::size_t>(rank) * bytes, bytes);
    messages.receive(rank, staged + static_cast<std::size_t>(rank) * bytes, bytes);
  }
  rows[static_cast<std::size_t>(place.rank)] = x + static_cast<std::size_t>(place.rank) * bytes;
  return moves_.exchange(messages);
}

void Sums::combine(byte* out, const Rows& rows, std::size_t count, const Sum& what) {
  moves_.space.combine({out, nullptr, rows, count, what.dtype, what.op, what.ranks});
}

const byte* Sums::padded(const byte* x, std::size_t count, std::size_t shard, const Sum& what) {
  if (shard * static_cast<std::size_t>(what.ranks) == count) return x;
  byte* longer =
      moves_.space.scratch(Scratch::padded, 0, shard * static_cast<std::size_t>(what.ranks) * what.item());
  moves_.space.copy(longer, x, count * what.item());
  return longer;
}

Steps Sums::one_shot(Sum what, int slot, const byte* x, byte* out, std::size_t count) {
  Rows rows;
  auto under_way = everyones(x, count * what.item(), slot, rows);
  co_yield 0;
  under_way.wait();
  combine(out, rows, count, what);
}

Steps Sums::two_shot(Sum what, int slot, const byte* x, byte* out, std::size_t count) {
  const std::size_t ranks = static_cast<std::size_t>(what.ranks), shard = divide_up(count, ranks),
                    n = shard * what.item();
  Rows rows;
  auto under_way = everyones_shards(padded(x, count, shard, what), n, slot, rows);
  co_yield 0;
  under_way.wait();
  byte* whole = shard * ranks == count ? out : moves_.space.scratch(Scratch::whole, 0, n * ranks);
  byte* mine = whole + static_cast<std::size_t>(moves_.place.rank) * n;
  combine(mine, rows, shard, what);
  under_way = moves_.all_gather(mine, whole, n);
  co_yield 0;
  under_way.wait();
  moves_.space.copy(out, whole, count * what.item());
}

Steps Sums::at_root(Sum what, int root, int slot, const byte* x, byte* out, std::size_t count) {
  Rows rows;
  auto under_way = everyones_at(x, count * what.item(), slot, root, rows);
  co_yield 0;
  under_way.wait();
  if (!rows.empty()) combine(out, rows, count, what);
}

Steps Sums::to_root(Sum what, int root, int slot, const byte* x, byte* out, std::size_t count) {
  const std::size_t ranks = static_cast<std::size_t>(what.ranks), shard = divide_up(count, ranks),
                    n = shard * what.item();
  Rows rows;
  auto under_way = everyones_shards(padded(x, count, shard, what), n, slot, rows);
  co_yield 0;
  under_way.wait();
  byte* mine = moves_.space.scratch(Scratch::shard, 0, n);
  combine(mine, rows, shard, what);
  const bool here = moves_.place.rank == root;
  byte* whole = here ? moves_.space.scratch(Scratch::whole, 0, n * ranks) : nullptr;
  moves_.gather(mine, whole, n, root).wait();
  if (here) moves_.space.copy(out, whole, count * what.item());
}

// Shards are whole wire blocks, except for what there is of the last. Pieces begin at multiples of kAlign,
// since a GPU takes them up in words.
Steps Sums::quantised_block(Sum what, int slot, const byte* x, byte* out, std::size_t count) {
  Space& space = moves_.space;
  const std::size_t ranks = static_cast<std::size_t>(what.ranks);
  const std::size_t shard = divide_up(count, wire::kBlock * ranks) * wire::kBlock;
  const std::size_t n = round_up(wire::bytes_of(shard), kAlign);
  auto begin = [&](std::size_t owner) { return std::min(owner * shard, count); };
  auto length = [&](std::size_t owner) { return std::min(shard, count - begin(owner)); };

  byte* coded = space.scratch(Scratch::coded, slot, n * ranks);
  for (std::size_t owner = 0; owner < ranks && length(owner) > 0; ++owner) {
    const byte* elements = x + begin(owner) * what.item();
    space.requantise(
        {coded + owner * n, {&elements, 1}, length(owner), what.dtype, what.op, what.wire, true, false});
  }
  Rows rows;
  auto under_way = everyones_shards(coded, n, slot, rows);
  co_yield 0;
  under_way.wait();
  byte* whole = space.scratch(Scratch::whole, 1 + slot, n * ranks);
  const auto me = static_cast<std::size_t>(moves_.place.rank);
  if (length(me) > 0)
    space.requantise({whole + me * n, rows, length(me), what.dtype, what.op, what.wire, false, false});
  under_way = moves_.all_gather(whole + me * n, whole, n);
  co_yield 0;
  under_way.wait();
  for (std::size_t owner = 0; owner < ranks && length(owner) > 0; ++owner) {
    const byte* piece = whole + owner * n;
    space.requantise({out + begin(owner) * what.item(),
                      {&piece, 1},
                      length(owner),
                      what.dtype,
                      what.op,
                      what.wire,
                      false,
                      true});
  }
}

}  // namespace unisono::nodes
