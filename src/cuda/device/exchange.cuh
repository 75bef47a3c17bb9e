// The kernel of an exchange.
//
// Framing: how a unit's data travels (framing.cuh, wire_lines.cuh). Combine: combine<Framing>(x, own, got)
// returns the unit of a shard's owner, from its own and those that have come. kMost: peers.
#pragma once

#include "cuda/device/messages.cuh"
#include "cuda/exchange.hpp"

namespace unisono::cuda {

// The time of a small message is that of the instructions before its first store and after its last load.
template <Step step, class Framing, int kMost, class Combine>
__global__ void __launch_bounds__(kMaxThreads) exchange(const __grid_constant__ Exchange x) {
  using Data = typename Framing::Data;
  constexpr bool kTwoSteps = step == Step::two_shot || step == Step::relay;
  const unsigned thread = threadIdx.x, stride = gridDim.x * x.piece_bytes;
  // A block has kTurns rings with each peer for each step, used in turn.
  const unsigned turn = static_cast<unsigned>(x.ranks) * kPackets, area = kTurns * turn;
  const unsigned ring = blockIdx.x * 2 * area + thread;
  const unsigned offset = Framing::offset(thread), head = Framing::head(thread);
  const unsigned first = blockIdx.x * x.piece_bytes;
  follow_last_kernel();
  if (first >= x.bytes) return;

  // The unit of this thread in the piece at `begin`. It travels if its line begins within the message.
  struct Unit {
    unsigned at, line;
    __device__ bool within(std::uint32_t bytes) const { return line < bytes; }
  };
  auto unit_at = [&](unsigned begin) -> Unit {
    return {begin + offset, head < x.piece_bytes ? begin + head : ~0u};
  };
  auto active = [&](int p, unsigned begin) {
    return kTwoSteps ? x.tokens[p] != nullptr : begin < x.send[p] || begin < x.receive[p];
  };
  Data own, given[kMost];
  auto load_own = [&](const Unit& unit) {
    if (x.own && unit.within(x.own_bytes)) own = Framing::load(x.own, unit.at, x.own_bytes);
  };
  auto load = [&](const Unit& unit) {
    load_own(unit);
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (unit.within(x.send[p])) given[p] = Framing::load(x.from[p], unit.at, x.send[p]);
  };
  load(unit_at(first));  // before anything is waited for

  std::uint32_t count[kMost], begun[kMost];  // messages with each peer, and the last that it has begun
  load_counts(count, x.counts + blockIdx.x);
  load_counts(begun, x.begun + blockIdx.x);
  bool lost = false;
  // Sends a unit as the `ahead`th message after those that are counted.
  auto give = [&](const Unit& unit, std::uint32_t ahead) {
    if (behind(x, count, begun, ahead)) lost = !await_turns(x, Counted<kMost>(count), ahead) || lost;
    if (lost) return;
    auto put = [&](int p) {
      const std::uint32_t number = count[p] + ahead;
      const bool there = unit.within(x.send[p]);
      Framing::put(there, x.rings[p] + (ring + number % kTurns * turn), number, given[p]);
      if (step == Step::relay && there && x.into[p]) Framing::store(x.into[p], unit.at, x.send[p], given[p]);
    };
    if constexpr (Framing::kBulk) {
      each_peer<kMost>(x.gives, put);
    } else {
#pragma unroll
      for (int p = 0; p < kMost; ++p) put(p);
    }
  };
  // Tells the peers that all counted messages have been read, and the next one has begun.
  auto tell = [&](unsigned begin) {
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (thread == p && active(p, begin)) store_relaxed(x.tokens[p] + blockIdx.x * kFewRanks, count[p] + 1);
  };
  auto receive = [&](const Unit& unit) {
    if (lost) return;
    auto take_from = [&](unsigned rings, const std::uint32_t (&bytes)[kMostPeers], Packet(&got)[kMost]) {
      lost = !take<Framing>(
          x, [&](int p) { return unit.within(bytes[p]); },
          [&](int p) { return x.arrived + (ring + rings + count[p] % kTurns * turn + p * kPackets); }, count,
          got);
    };
    Packet got[kMost];
    take_from(0, x.receive, got);
    if (lost) return;
    const bool there = unit.within(x.own_bytes);
    Data result = own;
    if constexpr (step == Step::move) {
#pragma unroll
      for (int p = 0; p < kMost; ++p)
        if (unit.within(x.receive[p]))
          Framing::store(x.into[p], unit.at, x.receive[p], Framing::data(got[p]));
    } else if (there) {
      result = Combine::template combine<Framing>(x, own, got);
    }
    if constexpr (kTwoSteps)
      each_peer<kMost>(x.passes, [&](int p) {
        Framing::put(there, x.rings[p] + (ring + area + count[p] % kTurns * turn), count[p], result);
      });
    if (there && x.result) Framing::store(x.result, unit.at, x.own_bytes, result);
    if constexpr (kTwoSteps) {
      take_from(area, x.back, got);
      if (lost) return;
#pragma unroll
      for (int p = 0; p < kMost; ++p)
        if (unit.within(x.back[p])) Framing::store(x.into[p], unit.at, x.back[p], Framing::data(got[p]));
    }
  };
  auto counted = [&](unsigned begin) {
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (active(p, begin)) ++count[p];
  };

  give(unit_at(first), 1);
  tell(first);
  if (first + stride >= x.bytes) {
    counted(first);
    receive(unit_at(first));
  } else {
    // Each piece is sent before the last one is received, so that the links have work in the meantime.
    bool more = true;
    for (unsigned last = first, next = first + stride; more; last = next, next += stride) {
      more = next < x.bytes;
      if (more) load(unit_at(next));
      if (last != first) {
        __syncthreads();  // every thread has read the pieces before the last
        tell(last - stride);
      }
      if (more) {
        load_counts(begun, x.begun + blockIdx.x);
        give(unit_at(next), 2);
      }
      counted(last);
      load_own(unit_at(last));
      receive(unit_at(last));
    }
  }
  __syncthreads();  // every thread has read the counts, and the messages up to the last of them
  if (thread > 0) return;
#pragma unroll
  for (int p = 0; p < kMost; ++p) x.counts[blockIdx.x].of[p] = count[p];
}

template <Step step, class Framing, class Combine>
ExchangeKernel exchange_of_ranks(int ranks) {
  if (ranks <= 2) return exchange<step, Framing, 1, Combine>;
  if (ranks <= 4) return exchange<step, Framing, 3, Combine>;
  return exchange<step, Framing, kMostPeers, Combine>;
}

}  // namespace unisono::cuda
