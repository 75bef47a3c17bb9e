// Counts of an exchange's messages with each peer, and waits for missing ones. Arrays by peer are indexed by
// values that the compiler knows, so that they stay in registers.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/exchange.hpp"

namespace unisono::cuda {

// A message that a thread waits for.
struct Missing {
  int peer = 0;
  std::uint32_t expected = 0, seen = 0;
  __device__ bool patient(const Exchange& x, std::uint64_t& began) const {
    return cuda::patient(Wait{x.context, rank_of(peer, x.rank), Slot::packet_credit}, began, expected, seen);
  }
};

// Loads the units at at(p), for peers with comes(p), until each has count[p]. All are polled together; to
// skip those that have come would cost more instructions. Returns false if the wait has failed.
template <class Framing, int kMost, class Comes, class At>
__device__ inline bool take(const Exchange& x, const Comes& comes, const At& at,
                            const std::uint32_t (&count)[kMost], Packet (&got)[kMost]) {
  std::uint64_t began = 0;
  for (std::uint32_t looks = 1;; ++looks) {
    bool complete = true;
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (comes(p)) got[p] = load_packet(at(p));
#pragma unroll
    for (int p = 0; p < kMost; ++p) complete = complete && (!comes(p) || Framing::complete(got[p], count[p]));
    if (Framing::all(complete)) return true;
    if (looks % kLook != 0) continue;
    Missing missing;
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (Framing::any(comes(p) && !Framing::complete(got[p], count[p])))
        missing = {p, count[p], count[p] - 1};
    if (!Framing::all(missing.patient(x, began))) return false;
  }
}

// Loads the counts of a block, in one or two loads.
template <int kMost>
__device__ inline void load_counts(std::uint32_t (&count)[kMost], const Counts* at) {
#pragma unroll
  for (int half = 0; half < kMost; half += 4) {
    const uint4 four = load_relaxed4(at->of + half);
    const std::uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int p = 0; p < 4 && half + p < kMost; ++p) count[half + p] = words[p];
  }
}

// Returns a negative number while p may still read the ring that the message `ahead` of those counted takes.
// The message kTurns before had that ring; p has read it once it has begun the next one.
template <int kMost>
__device__ inline std::int32_t lead(int p, const std::uint32_t (&count)[kMost],
                                    const std::uint32_t (&begun)[kMost], std::uint32_t ahead) {
  return static_cast<std::int32_t>(begun[p] - (count[p] + ahead - (kTurns - 1)));
}

// Returns whether `lead` is negative for any peer that this rank sends to.
template <int kMost>
__device__ inline bool behind(const Exchange& x, const std::uint32_t (&count)[kMost],
                              const std::uint32_t (&begun)[kMost], std::uint32_t ahead) {
  std::int32_t sign = 0;
#pragma unroll
  for (int p = 0; p < kMost; ++p)
    if (x.gives.has(p) || x.passes.has(p)) sign |= lead(p, count, begun, ahead);
  return __any_sync(0xffffffffu, sign < 0);
}

// Counts by value: a reference would put the kernel's own into local memory.
template <int kMost>
struct Counted {
  __device__ explicit Counted(const std::uint32_t (&count)[kMost]) {
#pragma unroll
    for (int p = 0; p < kMost; ++p) of[p] = count[p];
  }
  std::uint32_t of[kMost];
};

// Waits until no peer is behind. Returns false if the wait has failed.
template <int kMost>
__device__ __noinline__ bool await_turns(const Exchange& x, const Counted<kMost> count, std::uint32_t ahead) {
  std::uint32_t begun[kMost];
  std::uint64_t began = 0;
  for (std::uint32_t looks = 1;; ++looks) {
    load_counts(begun, x.begun + blockIdx.x);
    if (!behind(x, count.of, begun, ahead)) return true;
    if (looks % kLook != 0) continue;
    Missing missing;
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if ((x.gives.has(p) || x.passes.has(p)) && lead(p, count.of, begun, ahead) < 0)
        missing = {p, begun[p] - lead(p, count.of, begun, ahead), begun[p]};
    if (!__all_sync(0xffffffffu, missing.patient(x, began))) return false;
  }
}

// Calls `body` for the peers of `who`, those after this rank first: one other at a time serves each rank.
template <int kMost, class Body>
__device__ inline void each_peer(const Peers& who, const Body& body) {
#pragma unroll
  for (int p = 0; p < kMost; ++p)
    if (who.after >> p & 1u) body(p);
#pragma unroll
  for (int p = 0; p < kMost; ++p)
    if (who.before >> p & 1u) body(p);
}

}  // namespace unisono::cuda
