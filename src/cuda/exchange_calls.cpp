// Turns calls into exchanges: the messages of each rank, and the kernel that moves them.
#include <algorithm>

#include "cuda/gpu_engine.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {

std::size_t GpuEngine::longest(Collective collective, Algorithm algorithm, std::size_t bytes) const {
  const CollectiveTraits& traits = traits_of(collective);
  if (traits.by_blocks() || traits.by_parts()) return bytes / static_cast<std::size_t>(group_.size());
  const bool two_steps = form_of(algorithm) == Algorithm::two_shot;
  return two_steps ? shard_bytes(bytes, owners(collective, algorithm)) : bytes;
}

std::size_t GpuEngine::longest_part(const Request& request) {
  std::size_t most = 0;
  for (const auto* parts : {&request.sends, &request.receives})
    for (const Args::Part& part : *parts) most = std::max(most, part.bytes);
  return most;
}

// Describes a call as an exchange of one step: every rank gives each peer its part.
void GpuEngine::one_step(Exchange& x, const Request& request, int to, int from) const {
  const Args& a = request.args;
  const int n = group_.size(), me = group_.rank();
  auto give = [&](int p, const byte* data, std::size_t bytes) {
    (p == me ? x.own : x.from[peer_of(p, me)]) = data;
    (p == me ? x.own_bytes : x.send[peer_of(p, me)]) = static_cast<std::uint32_t>(bytes);
  };
  auto get = [&](int p, byte* data, std::size_t bytes) {
    (p == me ? x.result : x.into[peer_of(p, me)]) = data;
    (p == me ? x.own_bytes : x.receive[peer_of(p, me)]) = static_cast<std::uint32_t>(bytes);
  };
  const CollectiveTraits& traits = traits_of(request.collective);
  const std::size_t bytes = traits.by_blocks() ? a.block : a.bytes;
  for (int p = 0; p < n; ++p) {
    if (traits.by_parts()) {
      give(p, a.sends[p].at, a.sends[p].bytes);
      get(p, a.receives[p].at, a.receives[p].bytes);
    } else if (traits.two_ended) {
      if (p == to) give(p, a.in, a.bytes);
      if (p == from) get(p, a.out, a.bytes);
    } else {
      byte* const to = a.out + traits.out.begin(a.block, p);
      if (traits.moves(me, p, a.root)) give(p, a.in + traits.in.begin(a.block, p), bytes);
      // parts of peers that are combined stay in registers
      if (traits.moves(p, me, a.root)) get(p, traits.combines && p != me ? nullptr : to, bytes);
    }
  }
}

// Describes a call as an exchange of two steps. Each owner gets its shard from every rank that has a part of
// it, and passes the result on. In an all_reduce every rank owns a shard, of `shard` bytes or what is left;
// otherwise the root owns none.
void GpuEngine::two_steps(Exchange& x, const Request& request, std::size_t shard) const {
  const Args& a = request.args;
  const int n = group_.size(), me = group_.rank();
  const CollectiveTraits& traits = traits_of(request.collective);
  const bool all = !traits.rooted();
  auto gives = [&](int p) { return !traits.in.root_only || p == a.root; };
  auto gets = [&](int p) { return all || traits.out.root_only == (p == a.root); };
  auto share = [&](int p) {
    return all ? block_of(a.bytes, shard, p) : share_without(a.bytes, n, a.root, p);
  };
  auto narrow = [](std::size_t bytes) { return static_cast<std::uint32_t>(bytes); };
  x.root = a.root;
  const std::uint32_t mine = narrow(share(me).bytes);
  const bool copies = traits.in.root_only && me == a.root && a.out != a.in;
  for (int p = 0; p < n; ++p) {
    const Range its = share(p);
    const int i = peer_of(p, me);
    (p == me ? x.own : x.from[i]) = gives(me) ? a.in + its.begin : nullptr;
    (p == me ? x.result : x.into[i]) = gets(me) || copies ? a.out + its.begin : nullptr;
    if (p == me) continue;
    x.send[i] = gives(me) ? narrow(its.bytes) : 0;
    x.receive[i] = gives(p) ? mine : 0;
    if (gets(p) && mine > 0) x.passes.add(i, me);
    x.back[i] = gets(me) ? narrow(its.bytes) : 0;
  }
  x.own_bytes = mine;
}

// Exchanges parts that may be too long for one message. Every rank cuts every part at the same places, so
// that both ends of a pair agree. No rank needs to know how many slices the others' parts take, since a pair
// whose parts are empty has no message.
void GpuEngine::exchange_slices(const Request& request, Algorithm algorithm, const Shape& asked,
                                std::uint64_t call, cudaStream_t stream) const {
  auto slice = [&](std::size_t at) {
    return request.with_parts([at](const Args::Part& part) -> Args::Part {
      const std::size_t begin = smaller(at, part.bytes);
      return {part.at + begin, smaller(kSlice, part.bytes - begin)};
    });
  };
  std::size_t at = 0;
  for (auto some = slice(at); some; some = slice(at += kSlice))
    exchange(*some, algorithm, asked, call, -1, -1, stream);
}

Exchange GpuEngine::exchange_of(Collective collective, bool lines, std::uint64_t call) const {
  Exchange x;
  x.ranks = group_.size();
  x.rank = group_.rank();
  const std::size_t area = lines ? layout_.lines : layout_.packets;
  auto at = [&](int p, std::size_t offset) { return base_.bases[p] + offset; };
  for (int i = 0; i < x.ranks - 1; ++i) {
    const int p = rank_of(i, x.rank), seen = peer_of(x.rank, p);  // this rank as p numbers its peers
    x.rings[i] = reinterpret_cast<Packet*>(at(p, area)) + static_cast<std::size_t>(seen) * kPackets;
    x.tokens[i] = reinterpret_cast<Counts*>(at(p, layout_.tokens))->of + seen;
  }
  x.arrived = reinterpret_cast<const Packet*>(at(x.rank, area));
  x.begun = reinterpret_cast<Counts*>(at(x.rank, layout_.tokens));
  x.counts = reinterpret_cast<Counts*>(at(x.rank, layout_.counts));
  x.context = base_;
  x.context.timeout_ns = timeout_ns();
  x.context.collective = collective;
  x.context.call = call;
  return x;
}

void GpuEngine::exchange(const Request& request, Algorithm algorithm, const Shape& asked, std::uint64_t call,
                         int to, int from, cudaStream_t stream) const {
  const CollectiveTraits& traits = traits_of(request.collective);
  const bool parts = traits.by_parts();
  const Wire wire = request.call->wire;
  const bool exact = wire == Wire::exact;
  std::size_t most = parts ? longest_part(request) : longest(request.collective, algorithm, request.bytes());
  const std::size_t item = size_of(request.call->dtype);
  if (!exact) most = shard_bytes(request.call->count, group_.size()) * item;  // of whole wire blocks
  if (parts && most > kSlice) return exchange_slices(request, algorithm, asked, call, stream);
  if (most >= kMostMessage)
    throw UsageError(std::string(name_of(algorithm)) +
                     " carries messages below 2 GiB: leave algorithm out, or name another.");
  const int n = group_.size(), me = group_.rank();
  const bool lines = is_lines(algorithm);
  Exchange x = exchange_of(request.collective, lines, call);
  Step step = Step::move;
  if (form_of(algorithm) == Algorithm::two_shot) {
    two_steps(x, request, most);
    step = traits.combines ? Step::two_shot : Step::relay;
  } else {
    one_step(x, request, to, from);
    if (traits.combines) step = Step::combine;
  }
  x.bytes = static_cast<std::uint32_t>(most);
  x.dtype = request.call->dtype;
  x.op = request.call->op;
  if (step == Step::move && x.result == x.own) x.result = nullptr;
  std::uintptr_t all =
      reinterpret_cast<std::uintptr_t>(x.own) | reinterpret_cast<std::uintptr_t>(x.result) | x.own_bytes;
  for (int i = 0; i < n - 1; ++i) {
    all |= reinterpret_cast<std::uintptr_t>(x.from[i]) | reinterpret_cast<std::uintptr_t>(x.into[i]) |
           x.send[i] | x.receive[i] | x.back[i];
    if (x.send[i] > 0) x.gives.add(i, me);
  }
  const bool whole = all % kPacketBytes == 0;
  const std::size_t unit = unit_of(request.collective, algorithm, request.args.bytes);
  const Shape shape = cut(algorithm, asked, unit, exact ? kLineUnit : wire_unit(item));
  x.piece_bytes = static_cast<std::uint32_t>(shape.piece_bytes);
  const ExchangeKernel kernel =
      exact ? exchange_kernel(step, lines, whole, n, x.dtype, x.op) : wire_kernel(x.dtype, wire, n);
  start(reinterpret_cast<const void*>(kernel), &x, shape, stream);
}

}  // namespace unisono::cuda
