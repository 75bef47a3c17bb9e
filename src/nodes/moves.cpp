#include "nodes/moves.hpp"

#include <algorithm>

namespace unisono::nodes {
namespace {

constexpr std::size_t kLeastBlocks = 4;     // grains a rail, from which on a broadcast goes along the chain
constexpr std::size_t kMostGrains = 16;     // grains a rail, in a block of it
constexpr std::size_t kBeside = 256 << 10;  // bytes copied between two polls of an exchange: some 30 us

std::size_t at(int index, std::size_t n) { return static_cast<std::size_t>(index) * n; }

}  // namespace

Call Moves::call(const byte* in, byte* out, std::size_t count, int root) const {
  return {.in = in,
          .out = out,
          .count = count,
          .dtype = DType::u8,
          .root = root,
          .memory = space.memory(),
          .stream = space.stream()};
}

void Moves::inside(Collective collective, const byte* in, byte* out, std::size_t count, int root) {
  if (place.here() == 1) {  // a collective of one rank is a copy
    if (out && in && in != out) space.copy(out, in, count);
    return;
  }
  const Call c = call(in, out, count, root);
  local_.run({collective, c, place.local_rank, place.here()});
}

void Moves::copy_beside(Courier::Exchange& under_way, byte* to, const byte* from, std::size_t bytes) {
  if (to == from) return;
  if (space.memory() == Memory::device) return space.copy(to, from, bytes);  // the stream does it
  for (std::size_t begin = 0; begin < bytes; begin += kBeside) {
    space.copy(to + begin, from + begin, std::min(kBeside, bytes - begin));
    under_way.poll();
  }
}

void Moves::barrier() {
  local_.barrier();
  if (place.local_rank == 0) {
    byte* token = space.scratch(Scratch::token, 0, 1);
    byte* landing = space.scratch(Scratch::landed, 0, place.nodes.size());
    Messages messages;
    for (const int node : place.others) {
      const int leader = place.on(node)[0];
      messages.send(leader, token, 1);
      messages.receive(leader, landing + node, 1);
    }
    exchange(messages).wait();
  }
  local_.barrier();
}

Moves::Begun Moves::all_gather(const byte* x, byte* out, std::size_t n) {
  Messages messages;
  for (const int node : place.others) {
    messages.send(place.counterpart(node), x, n);
    const auto& ranks = place.on(node);
    for (int index = place.local_rank; index < static_cast<int>(ranks.size()); index += place.here()) {
      const int rank = ranks[static_cast<std::size_t>(index)];
      messages.receive(rank, out + at(rank, n), n);
    }
  }
  auto under_way = exchange(messages);
  copy_beside(under_way, out + at(place.rank, n), x, n);
  share(place.local(), out, n);
  if (place.here() == 1) return under_way;
  return {std::move(under_way), [this, out, n] {
            for (const int node : place.others) share(place.on(node), out, n);
          }};
}

// The blocks of a node's ranks, each of which has come to one local rank, to all local ranks.
void Moves::share(const std::vector<int>& ranks, byte* out, std::size_t n) {
  const int here = place.here();
  if (here == 1) return;
  if (static_cast<int>(ranks.size()) == here && consecutive(ranks)) {
    byte* whole = out + at(ranks[0], n);
    return inside(Collective::all_gather, whole + at(place.local_rank, n), whole, n);
  }
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    byte* block = out + at(ranks[index], n);
    inside(Collective::broadcast, block, block, n, static_cast<int>(index) % here);
  }
}

Moves::Begun Moves::all_to_all(const byte* x, byte* out, std::size_t n, int slot) {
  if (!place.uniform()) {
    std::vector<Args::Part> sends, receives;
    for (int rank = 0; rank < place.size(); ++rank) {
      sends.push_back({const_cast<byte*>(x) + at(rank, n), n});
      receives.push_back({out + at(rank, n), n});
    }
    all_to_all_v(sends, receives, x == out);
    return {};
  }
  if (x == out) {
    byte* kept = space.scratch(Scratch::in_place, slot, at(place.size(), n));
    space.copy(kept, x, at(place.size(), n));
    x = kept;
  }
  const int here = place.here();
  Messages messages;
  for (const int node : place.others) {
    const std::size_t first = at(place.on(node)[0], n);
    const byte* given = x + first;
    if (here > 1) {
      byte* packed = space.scratch(Scratch::packed, slot * place.count() + node, at(here, n));
      inside(Collective::all_to_all, given, packed, n);
      given = packed;
    }
    messages.send(place.counterpart(node), given, at(here, n));
    messages.receive(place.counterpart(node), out + first, at(here, n));
  }
  auto under_way = exchange(messages);
  const std::size_t first = at(place.local()[0], n);
  if (here == 1) copy_beside(under_way, out + first, x + first, n);
  else inside(Collective::all_to_all, x + first, out + first, n);
  return under_way;
}

std::vector<int> Moves::remote() const {
  std::vector<int> ranks;
  for (const int node : place.others) ranks.insert(ranks.end(), place.on(node).begin(), place.on(node).end());
  return ranks;
}

void Moves::all_to_all_v(std::span<const Args::Part> sends, std::span<const Args::Part> receives,
                         bool in_place) {
  auto part = [](std::span<const Args::Part> parts, int rank) {
    return parts[static_cast<std::size_t>(rank)];
  };
  std::vector<Args::Part> given(sends.begin(), sends.end());
  if (in_place) {
    std::size_t total = 0;
    for (const auto& one : given) total += one.bytes;
    byte* kept = space.scratch(Scratch::in_place, 0, total);
    for (auto& one : given) {
      space.copy(kept, one.at, one.bytes);
      one.at = kept;
      kept += one.bytes;
    }
  }
  Messages messages;
  for (const int rank : remote()) {
    messages.send(rank, part(given, rank).at, part(given, rank).bytes);
    messages.receive(rank, part(receives, rank).at, part(receives, rank).bytes);
  }
  auto under_way = exchange(messages);
  if (place.here() == 1) {
    copy_beside(under_way, part(receives, place.rank).at, part(given, place.rank).at,
                part(given, place.rank).bytes);
    return under_way.wait();
  }
  // what stays on the node
  std::vector<std::size_t> out_counts, in_counts;
  std::size_t out_bytes = 0, in_bytes = 0;
  for (const int rank : place.local()) {
    out_counts.push_back(part(given, rank).bytes);
    in_counts.push_back(part(receives, rank).bytes);
    out_bytes += out_counts.back();
    in_bytes += in_counts.back();
  }
  byte* packed = space.scratch(Scratch::packed, 0, std::max<std::size_t>(out_bytes, 1));
  byte* landed = space.scratch(Scratch::landed, 0, std::max<std::size_t>(in_bytes, 1));
  byte* to = packed;
  for (const int rank : place.local()) {
    space.copy(to, part(given, rank).at, part(given, rank).bytes);
    to += part(given, rank).bytes;
  }
  const Call c = call(packed, landed, 0);
  local_.run({c, place.local_rank, place.here(), out_counts, in_counts});
  const byte* from = landed;
  for (const int rank : place.local()) {
    space.copy(part(receives, rank).at, from, part(receives, rank).bytes);
    from += part(receives, rank).bytes;
  }
  under_way.wait();
}

bool Moves::chained(std::size_t bytes) const {
  const auto rails = static_cast<std::size_t>(place.here());
  return place.even && (rails > 1 || place.count() > 2) && bytes >= kLeastBlocks * rails * space.grain();
}

void Moves::broadcast(const byte* x, byte* out, std::size_t bytes, int root) {
  std::size_t done = 0;
  if (chained(bytes)) {
    const auto rails = static_cast<std::size_t>(place.here());
    // The last node waits for count - 2 blocks more than the first: for a quarter of the time at most, if the
    // grain lets it.
    const std::size_t quarter = bytes / (4 * place.nodes.size() * rails);
    const std::size_t part = std::min(std::max(quarter, space.grain()), kMostGrains * space.grain());
    done = bytes / (kAlign * rails) * kAlign * rails;
    if (place.rank == root) space.copy(out, x, done);
    broadcast_along_chain(out, done, root, std::max(part / kAlign * kAlign, kAlign));
  }
  if (done < bytes) broadcast_at_once(x + done, out + done, bytes - done, root);
}

// Block by block from node to node: local rank r takes part r of a block, `most` bytes, from its counterpart
// on the node before and passes it on, while the node shares the block. Every link carries `data` once.
void Moves::broadcast_along_chain(byte* data, std::size_t bytes, int root, std::size_t most) {
  const int rails = place.here(), home = place.home_of(root), last = place.count() - 1;
  const int hops = (place.node - home + last + 1) % (last + 1);
  const int before = place.counterpart((place.node + last) % (last + 1));
  const int behind = place.counterpart((place.node + 1) % (last + 1));
  const std::size_t block_bytes = at(rails, most);
  const int blocks = static_cast<int>(divide_up(bytes, block_bytes));
  auto block = [&](int index) { return data + at(index, block_bytes); };
  auto part_bytes = [&](int index) {
    return std::min(block_bytes, bytes - at(index, block_bytes)) / static_cast<std::size_t>(rails);
  };
  auto part = [&](int index) { return block(index) + at(place.local_rank, part_bytes(index)); };
  auto exists = [&](int index) { return 0 <= index && index < blocks; };
  for (int step = 0; step < blocks + last + 1; ++step) {
    const int leaving = step - 1 - hops;  // it has come in the step before; at home it has been shared then
    Messages messages;
    if (hops < last && exists(leaving)) messages.send(behind, part(leaving), part_bytes(leaving));
    if (hops > 0 && exists(leaving + 1)) messages.receive(before, part(leaving + 1), part_bytes(leaving + 1));
    auto under_way = exchange(messages);
    if (hops == 0 && step < blocks)
      inside(Collective::broadcast, block(step), block(step), at(rails, part_bytes(step)),
             place.local_number(root));
    else if (hops > 0 && exists(leaving))
      inside(Collective::all_gather, part(leaving), block(leaving), part_bytes(leaving));
    under_way.wait();
  }
}

void Moves::broadcast_at_once(const byte* x, byte* data, std::size_t bytes, int root) {
  const auto& home = place.on(place.home_of(root));
  const auto index = static_cast<std::size_t>(std::find(home.begin(), home.end(), root) - home.begin());
  auto head = [&](int node) { return place.on(node)[index % place.on(node).size()]; };
  Courier::Exchange under_way;
  if (place.rank == root) {
    Messages messages;
    for (const int node : place.others) messages.send(head(node), x, bytes);
    under_way = exchange(messages);
    copy_beside(under_way, data, x, bytes);
  } else if (place.rank == head(place.node)) {
    Messages messages;
    messages.receive(root, data, bytes);
    exchange(messages).wait();
  }
  inside(Collective::broadcast, data, data, bytes, place.local_number(head(place.node)));
  under_way.wait();
}

Moves::Begun Moves::gather(const byte* x, byte* out, std::size_t n, int root) {
  Messages messages;
  if (place.node != place.home_of(root)) {
    messages.send(root, x, n);
    return exchange(messages);
  }
  const int index = place.local_number(root);
  if (place.rank != root) {
    inside(Collective::gather, x, nullptr, n, index);
    return {};
  }
  for (const int rank : remote()) messages.receive(rank, out + at(rank, n), n);
  auto under_way = exchange(messages);
  if (place.together) {
    inside(Collective::gather, x, out + at(place.local()[0], n), n, index);
  } else {
    byte* landed = space.scratch(Scratch::landed, 0, at(place.here(), n));
    inside(Collective::gather, x, landed, n, index);
    for (int r = 0; r < place.here(); ++r)
      space.copy(out + at(place.local()[static_cast<std::size_t>(r)], n), landed + at(r, n), n);
  }
  return under_way;
}

void Moves::scatter(const byte* x, byte* out, std::size_t n, int root) {
  Messages messages;
  if (place.node != place.home_of(root)) {
    messages.receive(root, out, n);
    return exchange(messages).wait();
  }
  const int index = place.local_number(root);
  if (place.rank != root) return inside(Collective::scatter, nullptr, out, n, index);
  for (const int rank : remote()) messages.send(rank, x + at(rank, n), n);
  auto under_way = exchange(messages);
  if (place.together) {
    inside(Collective::scatter, x + at(place.local()[0], n), out, n, index);
  } else {
    byte* packed = space.scratch(Scratch::packed, 0, at(place.here(), n));
    for (int r = 0; r < place.here(); ++r)
      space.copy(packed + at(r, n), x + at(place.local()[static_cast<std::size_t>(r)], n), n);
    inside(Collective::scatter, packed, out, n, index);
  }
  under_way.wait();
}

void Moves::batch(std::span<const Args::Part> sends, std::span<const Args::Part> receives) {
  Messages messages;
  std::vector<Communicator::Outgoing> out;
  std::vector<Communicator::Incoming> in;
  for (int rank = 0; rank < place.size(); ++rank) {
    const Args::Part &to = sends[static_cast<std::size_t>(rank)],
                     &from = receives[static_cast<std::size_t>(rank)];
    const int here = place.local_number(rank);
    if (here < 0) {
      messages.send(rank, to.at, to.bytes);
      messages.receive(rank, from.at, from.bytes);
      continue;
    }
    if (to.at) out.push_back({to.at, to.bytes, here});
    if (from.at) in.push_back({from.at, from.bytes, here});
  }
  auto under_way = exchange(messages);
  if (!out.empty() || !in.empty()) {
    const Call c = call(nullptr, nullptr, 0);
    local_.run({c, place.local_rank, place.here(), out, in});
  }
  under_way.wait();
}

void Moves::send_recv(const byte* x, std::size_t sent, int to, byte* out, std::size_t received, int from) {
  if (to >= 0 && from >= 0 && x == out) {
    byte* kept = space.scratch(Scratch::in_place, 0, std::max<std::size_t>(sent, 1));
    space.copy(kept, x, sent);
    x = kept;
  }
  const int to_here = to < 0 ? -1 : place.local_number(to),
            from_here = from < 0 ? -1 : place.local_number(from);
  Messages messages;
  if (to >= 0 && to_here < 0) messages.send(to, x, sent);
  if (from >= 0 && from_here < 0) messages.receive(from, out, received);
  auto under_way = exchange(messages);
  if (to_here >= 0 || from_here >= 0) {
    const Collective which = from_here < 0 ? Collective::send
                             : to_here < 0 ? Collective::recv
                                           : Collective::send_recv;
    const Call c =
        call(to_here < 0 ? nullptr : x, from_here < 0 ? nullptr : out, to_here < 0 ? received : sent);
    local_.run_pair({which, c, place.local_rank, place.here(), to_here, from_here}, to_here, from_here);
  }
  under_way.wait();
}

}  // namespace unisono::nodes
