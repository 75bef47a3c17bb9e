#include "lane/cuda/exchange.hpp"

#include <bit>

#include "lane/cuda/framing.cuh"
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

// The units that come to at(p) from those peers that comes(p) names, with count[p]: all of them are looked
// for at once, again and again. False when the wait has failed.
template <class Framing, int kMost, class Comes, class At>
__device__ inline bool take(const Exchange& x, const Comes& comes, const At& at,
                            const std::uint32_t (&count)[kMost], Packet (&got)[kMost]) {
  unsigned missing = 0;
#pragma unroll
  for (int p = 0; p < kMost; ++p)
    if (Framing::any(comes(p))) missing |= 1u << p;
  std::uint64_t began = 0;
  for (std::uint32_t looks = 1; missing; ++looks) {
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (missing >> p & 1u && comes(p)) got[p] = load_packet(at(p));
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (missing >> p & 1u && Framing::all(!comes(p) || Framing::complete(got[p], count[p])))
        missing &= ~(1u << p);
    if (looks % kLook != 0 || !missing) continue;
    const int p = __ffs(static_cast<int>(missing)) - 1;
    std::uint32_t expected = 0;
#pragma unroll
    for (int q = 0; q < kMost; ++q)
      if (q == p) expected = count[q];
    if (!Framing::all(patient({x.context, p, Slot::packet_credit}, began, expected, expected - 1)))
      return false;
  }
  return true;
}

// Until peer p has begun its message `expected`: it has then read the last but one.
__device__ __noinline__ bool await_turn(const Exchange& x, int p, std::uint32_t expected) {
  return await(&x.begun[blockIdx.x].of[p], expected, Wait{x.context, p, Slot::packet_credit});
}

// The counts of a block, in one or two loads.
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

template <Step step, class Framing, int kMost, class Combine>
__global__ void __launch_bounds__(kMaxThreads) exchange(const __grid_constant__ Exchange x) {
  using Data = typename Framing::Data;
  constexpr bool kTwoSteps = step == Step::two_shot || step == Step::relay;
  const unsigned thread = threadIdx.x;
  const unsigned stride = gridDim.x * x.piece_bytes, first = blockIdx.x * x.piece_bytes;
  // A block has two rings with each peer for each step, used in turn, so that a peer may still read the last
  // message while the next one comes.
  const unsigned turn = static_cast<unsigned>(x.ranks) * kPackets, area = 2 * turn;
  const unsigned ring = blockIdx.x * 2 * area;
  follow_last_kernel();

  std::uint32_t count[kMost], begun[kMost];  // messages with each peer, and up to which it has begun
  load_counts(count, x.counts + blockIdx.x);
  load_counts(begun, x.begun + blockIdx.x);
  bool lost = false;

  for (unsigned begin = first; begin < x.bytes; begin += stride) {
    // Every thread of a warp goes through all units, a whole number of blocks of them.
    const unsigned units = Framing::units(x.bytes - begin < x.piece_bytes ? x.bytes - begin : x.piece_bytes);
    auto at = [&](unsigned unit) { return begin + Framing::offset(unit); };
    auto within = [&](unsigned unit, std::uint32_t bytes) {  // whole lines
      return unit < units && begin + Framing::head(unit) < bytes;
    };

    // What is given, asked for before anything is waited for.
    Data own, given[kMost];
    auto load_own = [&](unsigned unit) {
      if (x.own && within(unit, x.own_bytes)) own = Framing::load(x.own, at(unit), x.own_bytes);
    };
    auto load_given = [&](unsigned unit) {
      if (x.one_source) return;
#pragma unroll
      for (int p = 0; p < kMost; ++p)
        if (within(unit, x.send[p])) given[p] = Framing::load(x.from[p], at(unit), x.send[p]);
    };
    load_own(thread);
    load_given(thread);

    if (begin != first) {
      __syncthreads();  // every thread has read the last piece: the peers may send the next but one
      load_counts(begun, x.begun + blockIdx.x);
    }
    auto active = [&](int p) {
      return kTwoSteps ? x.tokens[p] != nullptr : begin < x.send[p] || begin < x.receive[p];
    };
#pragma unroll
    for (int p = 0; p < kMost; ++p) {
      if (!active(p)) continue;
      ++count[p];
      if ((kTwoSteps || begin < x.send[p]) && static_cast<std::int32_t>(begun[p] - (count[p] - 1)) < 0)
        lost = !await_turn(x, p, count[p] - 1) || lost;
    }
    lost = __any_sync(0xffffffffu, lost);

    for (unsigned unit = thread; unit - thread < units && !lost; unit += blockDim.x) {
      if (unit > thread) {
        if (x.one_source) load_own(unit);
        load_given(unit);
      }
#pragma unroll
      for (int p = 0; p < kMost; ++p) {
        if (x.send[p] == 0) continue;
        Data data = given[p];
        if (x.one_source) data = own;
        const bool there = within(unit, x.send[p]);
        Framing::put(there, x.rings[p] + (ring + count[p] % 2 * turn + unit), count[p], data);
        if (step == Step::relay && there && x.into[p]) Framing::store(x.into[p], at(unit), x.send[p], data);
      }
    }

#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (thread == p && active(p)) store_relaxed(x.tokens[p] + blockIdx.x * kMaxRanks, count[p]);

    for (unsigned unit = thread; unit - thread < units && !lost; unit += blockDim.x) {
      if (units > blockDim.x) load_own(unit);
      Packet got[kMost];
      lost = !take<Framing>(
          x, [&](int p) { return within(unit, x.receive[p]); },
          [&](int p) { return x.arrived + (ring + count[p] % 2 * turn + p * kPackets + unit); }, count, got);
      if (lost) break;
      const bool there = within(unit, x.own_bytes);
      Data result = own;
      if constexpr (step == Step::move) {
#pragma unroll
        for (int p = 0; p < kMost; ++p)
          if (within(unit, x.receive[p]))
            Framing::store(x.into[p], at(unit), x.receive[p], Framing::data(got[p]));
      } else if (there) {
#pragma unroll
        for (int w = 0; w < Framing::kWords; ++w) {
          std::uint64_t words[kMost] = {};
#pragma unroll
          for (int p = 0; p < kMost; ++p) words[p] = p == x.rank ? own.at[w] : Framing::data(got[p]).at[w];
          if constexpr (step != Step::relay) result.at[w] = Combine::combine(x, words);
          else
#pragma unroll
            for (int p = 0; p < kMost; ++p)
              if (p == x.root) result.at[w] = words[p];
        }
      }
      if constexpr (kTwoSteps) {
#pragma unroll
        for (int p = 0; p < kMost; ++p)
          if (x.pass[p] > 0)
            Framing::put(there, x.rings[p] + (ring + area + count[p] % 2 * turn + unit), count[p], result);
      }
      if (there && x.result) Framing::store(x.result, at(unit), x.own_bytes, result);
    }
    if constexpr (kTwoSteps) {
      for (unsigned unit = thread; unit - thread < units && !lost; unit += blockDim.x) {
        Packet got[kMost];
        lost = !take<Framing>(
            x, [&](int p) { return within(unit, x.back[p]); },
            [&](int p) { return x.arrived + (ring + area + count[p] % 2 * turn + p * kPackets + unit); },
            count, got);
        if (lost) break;
#pragma unroll
        for (int p = 0; p < kMost; ++p)
          if (within(unit, x.back[p])) Framing::store(x.into[p], at(unit), x.back[p], Framing::data(got[p]));
      }
    }
  }
  __syncthreads();  // every thread has read the counts, and what came by the last of them
  if (thread > 0) return;
#pragma unroll
  for (int p = 0; p < kMost; ++p) x.counts[blockIdx.x].of[p] = count[p];
}

template <Step step, class Framing, class Combine>
ExchangeKernel of_ranks(int ranks) {
  if (ranks <= 2) return exchange<step, Framing, 2, Combine>;
  if (ranks <= 4) return exchange<step, Framing, 4, Combine>;
  return exchange<step, Framing, kMaxRanks, Combine>;
}

template <Step step, class Framing>
ExchangeKernel combining(bool whole, int ranks, DType dtype, Op op) {
  if (!whole) return of_ranks<step, Ragged<Framing>, ByTable>(ranks);
  if (op == Op::sum && dtype == DType::f32) return of_ranks<step, Whole<Framing>, Sum<float>>(ranks);
  if (op == Op::sum && dtype == DType::bf16) return of_ranks<step, Whole<Framing>, Sum<BF16>>(ranks);
  return of_ranks<step, Whole<Framing>, ByTable>(ranks);
}
template <Step step, class Framing>
ExchangeKernel moving(bool whole, int ranks) {
  return whole ? of_ranks<step, Whole<Framing>, ByTable>(ranks)
               : of_ranks<step, Ragged<Framing>, ByTable>(ranks);
}

template <class Framing>
ExchangeKernel of_framing(Step step, bool whole, int ranks, DType dtype, Op op) {
  switch (step) {
    case Step::combine: return combining<Step::combine, Framing>(whole, ranks, dtype, op);
    case Step::two_shot: return combining<Step::two_shot, Framing>(whole, ranks, dtype, op);
    case Step::relay: return moving<Step::relay, Framing>(whole, ranks);
    default: return moving<Step::move, Framing>(whole, ranks);
  }
}

}  // namespace

ExchangeKernel exchange_kernel(Step step, bool lines, bool whole, int ranks, DType dtype, Op op) {
  return lines ? of_framing<Lines>(step, whole, ranks, dtype, op)
               : of_framing<Packets>(step, whole, ranks, dtype, op);
}

}  // namespace unisono::cuda
