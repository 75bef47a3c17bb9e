// A whole call on a GPU in one kernel, over the packets or lines of the exchanges (cuda/device/exchange.cuh),
// whose protocol this one keeps: a block has a message with every peer for each piece of its part of a row.
#pragma once

#include "cuda/device/cluster.cuh"
#include "cuda/device/messages.cuh"
#include "cuda/device/words.cuh"
#include "fused/cuda/row.cuh"

namespace unisono::fused::gpu {
namespace {

using cuda::Exchange;
using cuda::kMostPeers;
using cuda::Packet;

// Adds the residual to a word of sums.
template <class T>
__device__ inline std::uint64_t join(std::uint64_t sums, std::uint64_t residual) {
  constexpr int kCount = cuda::kPacketBytes / sizeof(T);
  using Word = Elements<T, kCount>;
  float sum[kCount], rest[kCount];
  std::bit_cast<Word>(sums).widen(sum);
  std::bit_cast<Word>(residual).widen(rest);
#pragma unroll
  for (int e = 0; e < kCount; ++e) sum[e] = sum[e] + rest[e];
  return std::bit_cast<std::uint64_t>(Word::narrow(sum));
}

// A piece of a block's share of a row: the row's number among its owner's, and the first byte in the share.
struct Piece {
  unsigned step, at;
};

// Finishes a share of a row that is not fast. Not inline: the kernel's fast rows need the registers.
template <class T>
__device__ __noinline__ void finish_slowly(const Work& work, Share share, Values values, std::size_t row,
                                           Rounds rounds) {
  Finisher<T, false>(work, share, {}, values, row, rounds).run();
}

// Load and store a thread's unit of a share, `at` bytes into it, in the row. Each of its words lies within a
// stretch: what several blocks share has whole words.
template <class T, class Framing>
__device__ inline typename Framing::Data load_unit(const byte* row, const Share& share, unsigned at,
                                                   unsigned end) {
  if constexpr (!Framing::kWhole)
    if (share.bits == kRowBits) return Framing::load(row, at, end);
  typename Framing::Data data;
#pragma unroll
  for (int w = 0; w < Framing::kWords; ++w) {
    if (!Framing::has(w) || at + 8 * w >= end) continue;
    const byte* const from = row + share.in_row((at + 8 * w) / sizeof(T)) * sizeof(T);
    if constexpr (Framing::kWhole) data.at[w] = *reinterpret_cast<const std::uint64_t*>(from);
    else data.at[w] = cuda::load_bytes<1>(from, 8).at[0];
  }
  return data;
}
template <class T, class Framing>
__device__ inline void store_unit(byte* row, const Share& share, unsigned at, unsigned end,
                                  const typename Framing::Data& data) {
  if constexpr (!Framing::kWhole)
    if (share.bits == kRowBits) return Framing::store(row, at, end, data);
#pragma unroll
  for (int w = 0; w < Framing::kWords; ++w) {
    if (!Framing::has(w) || at + 8 * w >= end) continue;
    byte* const to = row + share.in_row((at + 8 * w) / sizeof(T)) * sizeof(T);
    if constexpr (Framing::kWhole) *reinterpret_cast<std::uint64_t*>(to) = data.at[w];
    else cuda::store_bytes<1>(to, 8, {{data.at[w]}});
  }
}

// kMost: peers. Every step has a row of every owner, of which the last owners may have fewer; in one step all
// ranks have each row.
template <bool kTwoSteps, class T, class Framing, int kMost>
__global__ void __launch_bounds__(cuda::kMaxThreads) sum_and_finish(const __grid_constant__ SumAndFinish of) {
  using Data = typename Framing::Data;
  constexpr int kRows = kTwoSteps ? kMost : 1;  // that are given at a time
  extern __shared__ __align__(32) byte held[];
  const Exchange& x = of.x;
  const Work& work = of.work;
  const unsigned thread = threadIdx.x, team = blockIdx.x / of.cluster, teams = gridDim.x / of.cluster;
  const unsigned turn = static_cast<unsigned>(x.ranks) * cuda::kPackets, area = cuda::kTurns * turn;
  const unsigned ring = blockIdx.x * 2 * area + thread;
  const unsigned offset = Framing::offset(thread), head = Framing::head(thread);
  const Share share(blockIdx.x % of.cluster, of.bits, work.hidden);
  const unsigned end = share.count * sizeof(T);
  Piece piece{team, 0};
  Rounds::begin(of.cluster);
  cuda::come_to_cluster(of.cluster);
  cuda::follow_last_kernel();
  if (piece.step >= of.steps) return;

  const auto row_of = [&](int owner, unsigned step) {
    return kTwoSteps ? static_cast<std::size_t>(owner) * of.steps + step : std::size_t{step};
  };
  const auto owns = [&](int owner, unsigned step) {
    return owner < x.ranks && row_of(owner, step) < of.count;
  };
  const auto travels = [&](const Piece& one) { return head < x.piece_bytes && one.at + head < end; };
  const auto load = [&](const byte* rows, int owner, const Piece& one) -> Data {
    if (!owns(owner, one.step) || !travels(one)) return {};
    return load_unit<T, Framing>(rows + row_of(owner, one.step) * work.row_bytes, share, one.at + offset,
                                 end);
  };
  Data given[kRows];
  const auto load_given = [&](const Piece& one) {
#pragma unroll
    for (int p = 0; p < kRows; ++p)
      given[p] = load(of.rows, kTwoSteps ? cuda::rank_of(p, x.rank) : x.rank, one);
  };
  load_given(piece);  // before anything is waited for

  std::uint32_t count[kMost], begun[kMost];  // messages with each peer, and the last that it has begun
  cuda::load_counts(count, x.counts + blockIdx.x);
  cuda::load_counts(begun, x.begun + blockIdx.x);
  bool lost = false;
  // Sends a piece as the `ahead`th message after those that are counted.
  const auto give = [&](const Piece& one, std::uint32_t ahead) {
    if (cuda::behind(x, count, begun, ahead))
      lost = !cuda::await_turns(x, cuda::Counted<kMost>(count), ahead) || lost;
    if (lost) return;
    cuda::each_peer<kMost>(x.gives, [&](int p) {
      const std::uint32_t number = count[p] + ahead;
      const bool there = travels(one) && owns(cuda::rank_of(p, x.rank), one.step);
      Framing::put(there, x.rings[p] + (ring + number % cuda::kTurns * turn), number,
                   given[kTwoSteps ? p : 0]);
    });
  };
  // Tells the peers that all counted messages have been read, and the next one has begun.
  const auto tell = [&] {
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (thread == p && x.gives.has(p))
        cuda::store_relaxed(x.tokens[p] + blockIdx.x * cuda::kFewRanks, count[p] + 1);
  };
  // Takes this thread's unit of the next message of each peer that has one.
  const auto take = [&](unsigned step_area, const auto& comes, Packet(&got)[kMost]) {
    if (lost) return;
    lost = !cuda::take<Framing>(
        x, comes,
        [&](int p) {
          return x.arrived + (ring + step_area + count[p] % cuda::kTurns * turn + p * cuda::kPackets);
        },
        count, got);
  };
  // Keeps a unit, also as one of row `index` of those that the block holds.
  const auto keep = [&](unsigned index, int owner, const Piece& one, const Data& data) {
    if (lost) return;
    const unsigned at = one.at + offset;
    store_unit<T, Framing>(work.residual_out + row_of(owner, one.step) * work.row_bytes, share, at, end,
                           data);
    if (of.row_bytes == 0) return;
#pragma unroll
    for (int w = 0; w < Framing::kWords; ++w)
      if (Framing::has(w) && at + 8 * w < end)
        *reinterpret_cast<std::uint64_t*>(held + index * of.row_bytes + at + 8 * w) = data.at[w];
  };
  const auto receive = [&](const Piece& one, const Data& own, const Data& residual) {
    const bool mine = travels(one) && owns(x.rank, one.step);
    Packet got[kMost];
    take(0, [&](int p) { return mine && x.gives.has(p); }, got);
    Data joined;
    if (mine && !lost) {
#pragma unroll
      for (int w = 0; w < Framing::kWords; ++w)
        joined.at[w] =
            join<T>(cuda::combine_words<T, Op::sum>(cuda::words_of<Framing>(own, got, x.rank, w), x.ranks),
                    residual.at[w]);
    }
    if constexpr (kTwoSteps)
      if (owns(x.rank, one.step) && !lost)
        cuda::each_peer<kMost>(x.passes, [&](int p) {
          Framing::put(mine, x.rings[p] + (ring + area + count[p] % cuda::kTurns * turn), count[p], joined);
        });
    if (mine) keep(0, x.rank, one, joined);
    if constexpr (kTwoSteps) {
      const auto comes = [&](int p) { return travels(one) && owns(cuda::rank_of(p, x.rank), one.step); };
      take(area, comes, got);
#pragma unroll
      for (int p = 0; p < kMost; ++p)
        if (comes(p)) keep(p + 1, cuda::rank_of(p, x.rank), one, Framing::data(got[p]));
    }
  };
  unsigned round = 0;
  const auto finish = [&](unsigned step, const Weights<T>& weights) {
    for (unsigned index = 0; index < (kTwoSteps ? static_cast<unsigned>(x.ranks) : 1u); ++index) {
      const int owner = index == 0 ? x.rank : cuda::rank_of(static_cast<int>(index) - 1, x.rank);
      if (!owns(owner, step)) continue;
      const std::size_t row = row_of(owner, step);
      const Rounds rounds(of.cluster, round);
      round += rounds_of(work);
      const Values in_shared{.at = held + index * of.row_bytes, .alone = true, .whole = true};
      if constexpr (Framing::kWhole)
        if (work.whole && of.row_bytes > 0) {
          Finisher<T, true>(work, share, weights, in_shared, row, rounds).run();
          continue;
        }
      const Values values =
          of.row_bytes > 0
              ? in_shared
              : Values{.at = work.residual_out + row * work.row_bytes, .alone = false, .whole = work.whole};
      finish_slowly<T>(work, share, values, row, rounds);
    }
  };

  give(piece, 1);
  tell();
  const Weights<T> weights = weights_of<T>(work, share);
  cuda::await_cluster(of.cluster);  // its blocks have begun
  for (bool first = true;; first = false) {
    // Each piece is sent before the last one is received, so that the links have work in the meantime.
    Data own = given[0];
    if constexpr (kTwoSteps) own = load(of.rows, x.rank, piece);
    const Data residual = load(work.residual, x.rank, piece);
    Piece next{piece.step, piece.at + x.piece_bytes};
    if (next.at >= end) next = {piece.step + teams, 0};
    const bool more = next.step < of.steps;
    if (more) load_given(next);
    if (!first) {
      __syncthreads();  // every thread has read the pieces before this one
      tell();
    }
    if (more) {
      cuda::load_counts(begun, x.begun + blockIdx.x);
      give(next, 2);
    }
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (x.gives.has(p)) ++count[p];
    receive(piece, own, residual);
    if (next.step != piece.step) {
      __syncthreads();  // the block's shares of the step's rows are there
      finish(piece.step, weights);
    }
    if (!more) break;
    piece = next;
  }
  __syncthreads();  // every thread has read the counts, and the messages up to the last of them
  if (thread > 0) return;
#pragma unroll
  for (int p = 0; p < kMost; ++p) x.counts[blockIdx.x].of[p] = count[p];
}

template <bool kTwoSteps, class T, class Framing, int kMost>
const void* address() {
  void (*const kernel)(SumAndFinish) = sum_and_finish<kTwoSteps, T, Framing, kMost>;
  return reinterpret_cast<const void*>(kernel);
}

template <bool kTwoSteps, class T, class Framing>
const void* of_ranks(bool whole, int ranks) {
  if (!whole) return address<kTwoSteps, T, cuda::Ragged<Framing>, kMostPeers>();
  if (ranks <= 2) return address<kTwoSteps, T, cuda::Whole<Framing>, 1>();
  if (ranks <= 4) return address<kTwoSteps, T, cuda::Whole<Framing>, 3>();
  return address<kTwoSteps, T, cuda::Whole<Framing>, kMostPeers>();
}

template <bool kTwoSteps, class T>
const void* of_framing(const Form& form) {
  return form.lines ? of_ranks<kTwoSteps, T, cuda::Lines>(form.whole, form.ranks)
                    : of_ranks<kTwoSteps, T, cuda::Packets>(form.whole, form.ranks);
}

// Returns the kernel of a form. Instantiated once for each number of steps: nvcc takes its time.
template <bool kTwoSteps>
const void* kernel_of(const Form& form) {
  if (form.dtype == DType::f32) return of_framing<kTwoSteps, float>(form);
  if (form.dtype == DType::f16) return of_framing<kTwoSteps, F16>(form);
  return of_framing<kTwoSteps, BF16>(form);
}

}  // namespace
}  // namespace unisono::fused::gpu
