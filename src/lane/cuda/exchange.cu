#include "lane/cuda/exchange.hpp"

#include <bit>

#include "lane/cuda/memory.cuh"
#include "lane/cuda/move.cuh"
#include "lane/cuda/wait.cuh"

namespace unisono::cuda {
namespace {

// Eight bytes of `n` ranks, combined in rank order.
template <class T, Op op, int kMost>
__device__ std::uint64_t combine_words(const std::uint64_t (&words)[kMost], int n) {
  using P = Pack<T, kPacketBytes / sizeof(T)>;
  P result;
#pragma unroll
  for (std::size_t e = 0; e < kPacketBytes / sizeof(T); ++e) {
    auto wide = Wide<T>::from(std::bit_cast<P>(words[0]).elements[e]);
#pragma unroll
    for (int s = 1; s < kMost; ++s)
      if (s < n) wide = unisono::combine<op, T>(wide, Wide<T>::from(std::bit_cast<P>(words[s]).elements[e]));
    result.elements[e] = Wide<T>::to(finish<op, T>(wide, n));
  }
  return std::bit_cast<std::uint64_t>(result);
}

using CombineWords = std::uint64_t (*)(const std::uint64_t (&words)[kMaxRanks], int n);
#define UNISONO_OPS(T)                                                          \
  {combine_words<T, Op::sum, kMaxRanks>, combine_words<T, Op::prod, kMaxRanks>, \
   combine_words<T, Op::min, kMaxRanks>, combine_words<T, Op::max, kMaxRanks>,  \
   combine_words<T, Op::avg, kMaxRanks>}
__device__ const CombineWords combiners[kDTypes][kOps] = {
    UNISONO_OPS(float),       UNISONO_OPS(double),       UNISONO_OPS(F16),          UNISONO_OPS(BF16),
    UNISONO_OPS(std::int8_t), UNISONO_OPS(std::uint8_t), UNISONO_OPS(std::int32_t), UNISONO_OPS(std::int64_t),
    UNISONO_OPS(E4M3),        UNISONO_OPS(E5M2)};

// Which combination a kernel has compiled in; the others look theirs up.
struct ByTable {
  template <int kMost>
  __device__ static std::uint64_t combine(const Exchange& x, const std::uint64_t (&words)[kMost]) {
    std::uint64_t all[kMaxRanks] = {};
#pragma unroll
    for (int p = 0; p < kMost; ++p) all[p] = words[p];
    return combiners[static_cast<int>(x.dtype)][static_cast<int>(x.op)](all, x.ranks);
  }
};
template <class T>
struct Sum {
  template <int kMost>
  __device__ static std::uint64_t combine(const Exchange& x, const std::uint64_t (&words)[kMost]) {
    return combine_words<T, Op::sum>(words, x.ranks);
  }
};

// The rings of a block with a peer: two of each area, used in turn, so that a peer may still read the last
// message while the next one comes. Area 1 takes the second step of a two_shot.
__device__ inline Packet* ring(byte* rings, int area, std::uint32_t count, int ranks) {
  const std::size_t at = ((static_cast<std::size_t>(blockIdx.x) * 2 + area) * 2 + count % 2) * ranks;
  return reinterpret_cast<Packet*>(rings) + at * kPackets;
}

__device__ inline void put(Packet* at, std::uint32_t count, std::uint64_t data) {
  const std::uint64_t flag = static_cast<std::uint64_t>(count) << 32;
  store_packet(at, {flag | (data & 0xffffffffu), flag | data >> 32});
}

// The packets at `at(p)` of those peers that `comes(p)` names, with `count(p)`: all of them are looked for at
// once, again and again. False when the wait has failed.
template <int kMost, class Comes, class At>
__device__ inline bool take(const Exchange& x, const Comes& comes, const At& at,
                            const std::uint32_t (&count)[kMost], std::uint64_t (&words)[kMost]) {
  Packet got[kMost];
  std::uint64_t began = 0;
#pragma unroll
  for (int p = 0; p < kMost; ++p)  // flags that nobody waits for, also where the count has gone round
    if (comes(p)) got[p].low = got[p].high = static_cast<std::uint64_t>(~count[p]) << 32;
  for (std::uint32_t looks = 1;; ++looks) {
    bool all = true;
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (comes(p) && !complete(got[p], count[p])) got[p] = load_packet(at(p));
#pragma unroll
    for (int p = 0; p < kMost; ++p) all = all && (!comes(p) || complete(got[p], count[p]));
    if (all) break;
    if (looks % kLook != 0) continue;
    for (int p = 0; p < kMost; ++p) {
      if (!comes(p) || complete(got[p], count[p])) continue;
      const auto seen = static_cast<std::uint32_t>(got[p].low >> 32);
      if (!patient({x.context, p, Slot::packet_credit}, began, count[p], seen)) return false;
      break;
    }
  }
#pragma unroll
  for (int p = 0; p < kMost; ++p)
    if (comes(p)) words[p] = (got[p].low & 0xffffffffu) | got[p].high << 32;
  return true;
}

template <int kMost>
__device__ inline std::uint64_t own_of(const std::uint64_t (&words)[kMost], int me) {
  std::uint64_t word = 0;
#pragma unroll
  for (int p = 0; p < kMost; ++p)
    if (p == me) word = words[p];
  return word;
}

template <Step step, int kMost, class Combine>
__global__ void __launch_bounds__(kMaxThreads) exchange(const __grid_constant__ Exchange x) {
  constexpr bool kCombines = step != Step::move;
  const int n = x.ranks, me = x.rank;
  follow_last_kernel();
  byte* const own = x.context.bases[me];
  auto* const counts =
      reinterpret_cast<std::uint32_t*>(own + x.context.layout.counts) + blockIdx.x * kMaxRanks;
  auto token = [&](int owner, int writer) {
    return reinterpret_cast<Flag*>(x.context.bases[owner] + x.context.layout.tokens) +
           blockIdx.x * kMaxRanks + writer;
  };
  std::uint32_t count[kMost];  // messages exchanged with each peer, by this block
  std::uint32_t begun[kMost];  // up to which the peer has begun
#pragma unroll
  for (int p = 0; p < kMost; ++p) {
    if (p >= n || p == me) continue;
    count[p] = counts[p];
    begun[p] = load_relaxed(&token(me, p)->count);
  }
  std::uint32_t mine =
      static_cast<int>(threadIdx.x) < n ? counts[threadIdx.x] : 0;  // thread p speaks to peer p
  bool lost = false;

  // What this thread gives first, asked for before anything is waited for.
  std::uint64_t first[kMost] = {};
  const std::size_t first_at =
      blockIdx.x * static_cast<std::size_t>(x.piece_bytes) + threadIdx.x * kPacketBytes;
#pragma unroll
  for (int p = 0; p < kMost; ++p)
    if (p < n && p != (x.one_source ? -1 : me) && (!x.one_source || p == me) && first_at < x.send[p])
      first[p] = load_some(x.from[p], first_at, x.send[p], x.aligned);

  for (std::size_t begin = blockIdx.x * static_cast<std::size_t>(x.piece_bytes); begin < x.bytes;
       begin += gridDim.x * static_cast<std::size_t>(x.piece_bytes)) {
    if (begin != blockIdx.x * static_cast<std::size_t>(x.piece_bytes)) {
      __syncthreads();  // every thread has read the last piece: the peers may send the next but one
#pragma unroll
      for (int p = 0; p < kMost; ++p)
        if (p < n && p != me) begun[p] = load_relaxed(&token(me, p)->count);
    }
    auto active = [&](int p) {
      return p != me && (step == Step::two_shot || begin < x.send[p] || begin < x.receive[p]);
    };
    if (static_cast<int>(threadIdx.x) < n && active(static_cast<int>(threadIdx.x)))
      store_relaxed(&token(static_cast<int>(threadIdx.x), me)->count, ++mine);
    const std::size_t end = smaller(begin + x.piece_bytes, x.bytes);

#pragma unroll
    for (int p = 0; p < kMost; ++p) {
      if (p >= n || !active(p)) continue;
      ++count[p];
      if (begin < x.send[p] && static_cast<std::int32_t>(begun[p] - (count[p] - 1)) < 0)
        lost = !await(&token(me, p)->count, count[p] - 1, Wait{x.context, p, Slot::packet_credit}) || lost;
    }
    for (std::size_t at = begin + threadIdx.x * kPacketBytes; at < end; at += blockDim.x * kPacketBytes) {
      const std::size_t i = (at - begin) / kPacketBytes;
      std::uint64_t word = 0;
      const bool at_first = at == first_at;
      if (x.one_source)
        word = at_first ? own_of(first, me) : load_some(x.from[me], at, x.send[me], x.aligned);
#pragma unroll
      for (int p = 0; p < kMost; ++p) {
        if (p >= n || p == me || at >= x.send[p]) continue;
        if (!x.one_source) word = at_first ? first[p] : load_some(x.from[p], at, x.send[p], x.aligned);
        if (!lost) put(ring(x.rings[p], 0, count[p], n) + i, count[p], word);
      }
    }

    byte* const arrived = own + x.context.layout.packets;
    auto from_peer = [&](int area, int p, std::size_t i) {
      return ring(arrived, area, count[p], n) + static_cast<std::size_t>(p) * kPackets + i;
    };
    for (std::size_t at = begin + threadIdx.x * kPacketBytes; at < end && !lost;
         at += blockDim.x * kPacketBytes) {
      const std::size_t i = (at - begin) / kPacketBytes;
      const std::uint32_t shard = step == Step::two_shot ? x.send[me] : 0;
      const std::uint32_t mine_bytes = step == Step::two_shot ? shard : x.receive[me];
      std::uint64_t words[kMost] = {};
      const std::uint64_t own_word =
          at < mine_bytes && x.into[me] ? load_some(x.from[me], at, mine_bytes, x.aligned) : 0;
      const auto comes = [&](int p) {
        return p < n && p != me && at < (step == Step::two_shot ? shard : x.receive[p]);
      };
      lost = !take(x, comes, [&](int p) { return from_peer(0, p, i); }, count, words);
#pragma unroll
      for (int p = 0; p < kMost; ++p) {
        if (p == me) words[p] = own_word;
        const bool moves = !kCombines && !lost && p < n && at < x.receive[p];
        if (moves && x.into[p] && (p != me || x.into[p] != x.from[p]))
          store_some(x.into[p], at, x.receive[p], x.aligned, words[p]);
      }
      if constexpr (kCombines) {
        if (lost || at >= mine_bytes || !x.into[me]) continue;
        words[0] = Combine::combine(x, words);
        store_some(x.into[me], at, mine_bytes, x.aligned, words[0]);
        if constexpr (step == Step::two_shot) {
#pragma unroll
          for (int p = 0; p < kMost; ++p)
            if (p < n && p != me) put(ring(x.rings[p], 1, count[p], n) + i, count[p], words[0]);
        }
      }
    }
    if constexpr (step == Step::two_shot) {
      for (std::size_t at = begin + threadIdx.x * kPacketBytes; at < end && !lost;
           at += blockDim.x * kPacketBytes) {
        const std::size_t i = (at - begin) / kPacketBytes;
        std::uint64_t words[kMost];
        const auto comes = [&](int p) { return p < n && p != me && at < x.send[p]; };
        lost = !take(x, comes, [&](int p) { return from_peer(1, p, i); }, count, words);
#pragma unroll
        for (int p = 0; p < kMost; ++p)
          if (comes(p) && !lost) store_some(x.into[p], at, x.send[p], x.aligned, words[p]);
      }
    }
  }
  __syncthreads();  // every thread has read the counts, and what came by the last of them
  if (static_cast<int>(threadIdx.x) < n && static_cast<int>(threadIdx.x) != me) counts[threadIdx.x] = mine;
}

template <Step step, class Combine>
ExchangeKernel of_ranks(int ranks) {
  if (ranks <= 2) return exchange<step, 2, Combine>;
  if (ranks <= 4) return exchange<step, 4, Combine>;
  return exchange<step, kMaxRanks, Combine>;
}

template <Step step>
ExchangeKernel combining(int ranks, DType dtype, Op op) {
  if (op == Op::sum && dtype == DType::f32) return of_ranks<step, Sum<float>>(ranks);
  if (op == Op::sum && dtype == DType::bf16) return of_ranks<step, Sum<BF16>>(ranks);
  return of_ranks<step, ByTable>(ranks);
}

}  // namespace

ExchangeKernel exchange_kernel(Step step, int ranks, DType dtype, Op op) {
  switch (step) {
    case Step::combine: return combining<Step::combine>(ranks, dtype, op);
    case Step::two_shot: return combining<Step::two_shot>(ranks, dtype, op);
    default: return of_ranks<Step::move, ByTable>(ranks);
  }
}

}  // namespace unisono::cuda
