// A whole RMS norm on a GPU in one kernel, of few short rows: a cluster of blocks for each row, in one step.
// Its messages are those of sum_and_finish (exchange.cuh), which other ranks may run; but all of a row leave
// at once, and what follows the sum is in registers (registers.cuh).
#pragma once

#include "fused/cuda/exchange.cuh"
#include "fused/cuda/registers.cuh"

namespace unisono::fused::gpu {
namespace {

// Returns the sum over the ranks of a word, with the residual's. got: of the peers.
template <class T, class Framing, int kMost>
__device__ inline std::uint64_t sum_and_join(std::uint64_t own, const Packet (&got)[kMost], const Exchange& x,
                                             int w, std::uint64_t residual) {
  constexpr int kCount = cuda::kPacketBytes / sizeof(T);
  using Word = Elements<T, kCount>;
  float sum[kCount], next[kCount];
  const auto add = [&](std::uint64_t word) {
    std::bit_cast<Word>(word).widen(next);
#pragma unroll
    for (int e = 0; e < kCount; ++e) sum[e] = sum[e] + next[e];
  };
  if constexpr (kMost == 1) {  // a sum of two is the same in either order
    std::bit_cast<Word>(own).widen(sum);
    add(Framing::data(got[0]).at[w]);
  } else {
    const auto of_rank = [&](int r) {
      const std::uint64_t before = Framing::data(got[r < kMost ? r : r - 1]).at[w];
      const std::uint64_t after = Framing::data(got[r > 0 ? r - 1 : r]).at[w];
      return r == x.rank ? own : r < x.rank ? before : after;
    };
    std::bit_cast<Word>(of_rank(0)).widen(sum);
#pragma unroll
    for (int r = 1; r <= kMost; ++r)
      if (r < x.ranks) add(of_rank(r));
  }
  const Word rounded = Word::narrow(sum);
  rounded.widen(sum);
  add(residual);
  return std::bit_cast<std::uint64_t>(Word::narrow(sum));
}

// kMost: peers. kShares: blocks of a cluster. kMessages: with each peer. Two may be sent before any of them
// is begun: the last call's first message, which is among the last two, has been begun.
template <class T, class Framing, int kMost, unsigned kShares, unsigned kMessages>
__global__ void __launch_bounds__(cuda::kMaxThreads)
    sum_and_finish_short(const __grid_constant__ SumAndFinish of) {
  using Data = typename Framing::Data;
  static_assert(kMessages <= 2);
  constexpr unsigned kStretches = kMostShort / kStretch, kSureStretches = kNotShort / kStretch;  // of a row
  using Of = Place<kShares, kSureStretches / kShares, kStretches / kShares>;
  extern __shared__ __align__(32) byte held[];
  const Exchange& x = of.x;
  const Work& work = of.work;
  const unsigned thread = threadIdx.x, row = blockIdx.x / kShares;
  const unsigned turn = static_cast<unsigned>(x.ranks) * cuda::kPackets, area = cuda::kTurns * turn;
  const unsigned ring = blockIdx.x * 2 * area + thread;
  const unsigned offset = Framing::offset(thread), head = Framing::head(thread);
  const Share share(blockIdx.x % kShares, Of::kBits, work.hidden);
  const unsigned end = share.count * sizeof(T);
  const std::size_t row_at = row * work.row_bytes;
  const auto travels = [&](unsigned m) { return head < x.piece_bytes && m * x.piece_bytes + head < end; };
  const auto at = [&](unsigned m, int w) { return m * x.piece_bytes + offset + 8 * w; };
  const auto has = [&](unsigned m, int w) { return travels(m) && Framing::has(w) && at(m, w) < end; };
  unsigned in_row[kMessages][Framing::kWords];  // where each word is, in bytes
#pragma unroll
  for (unsigned m = 0; m < kMessages; ++m)
#pragma unroll
    for (int w = 0; w < Framing::kWords; ++w)
      in_row[m][w] = share.in_row(at(m, w) / sizeof(T)) * static_cast<unsigned>(sizeof(T));
  const auto load = [&](const byte* rows, unsigned m) {
    Data data;
#pragma unroll
    for (int w = 0; w < Framing::kWords; ++w)
      if (has(m, w)) data.at[w] = *reinterpret_cast<const std::uint64_t*>(rows + row_at + in_row[m][w]);
    return data;
  };
  const auto gives = [&](int p) { return kMost == 1 || x.gives.has(p); };
  Rounds::begin(kShares);
  cuda::come_to_cluster(kShares);
  cuda::follow_last_kernel(of.rows + row_at + in_row[0][0], work.residual + row_at + in_row[0][0]);
  Data given[kMessages];
#pragma unroll
  for (unsigned m = 0; m < kMessages; ++m) given[m] = load(of.rows, m);

  std::uint32_t count[kMost], begun[kMost];  // messages with each peer, and the last that it has begun
  cuda::load_counts(count, x.counts + blockIdx.x);
  cuda::load_counts(begun, x.begun + blockIdx.x);
  bool lost = false;
  if (cuda::behind(x, count, begun, kMessages))
    lost = !cuda::await_turns(x, cuda::Counted<kMost>(count), kMessages);
  const auto give = [&](unsigned m, int p) {
    const std::uint32_t number = count[p] + 1 + m;
    Framing::put(travels(m), x.rings[p] + (ring + number % cuda::kTurns * turn), number, given[m]);
  };
  if (!lost) {
#pragma unroll
    for (unsigned m = 0; m < kMessages; ++m)
      if constexpr (kMost == 1) give(m, 0);
      else cuda::each_peer<kMost>(x.gives, [&](int p) { give(m, p); });
  }
#pragma unroll
  for (int p = 0; p < kMost; ++p)  // all counted messages have been read, and the next one has begun
    if (thread == p && gives(p))
      cuda::store_relaxed(x.tokens[p] + blockIdx.x * cuda::kFewRanks, count[p] + 1);

  // The residual and the weights come while a thread waits for its peers.
  Data residual[kMessages];
#pragma unroll
  for (unsigned m = 0; m < kMessages; ++m) residual[m] = load(work.residual, m);
  const bool finishes = thread < kSummers;
  const Of place(share);
  Vectors<T, Of> weight;
  if (finishes) weight = Vectors<T, Of>(reinterpret_cast<const T*>(work.weight), place);
  cuda::await_cluster(kShares);  // its blocks have begun

#pragma unroll
  for (unsigned m = 0; m < kMessages; ++m) {
#pragma unroll
    for (int p = 0; p < kMost; ++p)
      if (gives(p) && (m == 0 || m * x.piece_bytes < end)) ++count[p];  // a share may need fewer
    Packet got[kMost];
    if (!lost)
      lost = !cuda::take<Framing>(
          x, [&](int p) { return travels(m) && gives(p); },
          [&](int p) { return x.arrived + (ring + count[p] % cuda::kTurns * turn + p * cuda::kPackets); },
          count, got);
    if (lost) continue;
#pragma unroll
    for (int w = 0; w < Framing::kWords; ++w) {
      const std::uint64_t joined = sum_and_join<T, Framing>(given[m].at[w], got, x, w, residual[m].at[w]);
      if (has(m, w)) *reinterpret_cast<std::uint64_t*>(held + at(m, w)) = joined;
    }
  }
  __syncthreads();  // the block's share is there; every thread has read the counts, and the messages
  if (!finishes) return;

  const T* const sums_of_share = reinterpret_cast<const T*>(held);
  Rounds rounds(kShares, 0);
  float sums[kEach] = {};
  Vectors<T, Of> joined;
  if constexpr (kShares == 1) {
    joined = Vectors<T, Of>::of_share(sums_of_share, place);
#pragma unroll
    for (unsigned v = 0; v < Of::kVectors; ++v) add_squares(sums, joined.of[v]);
    rounds.tell(0, thread, sums);
  } else {
    // A warp of each scheduler adds. Where that is more than once for each partial sum, it tells fewer
    // blocks.
    constexpr unsigned kAdders = kSummers / 2, kColumns = kSummers / kShares, kTellers = kAdders / kColumns;
    const unsigned column = thread % kColumns;
    if (thread < kAdders) {
      Elements<T, kEach> terms[kStretches];
#pragma unroll
      for (unsigned s = 0; s < kStretches; ++s) {
        const unsigned i = (s * kColumns + column) * kEach;
        const bool there = s < kSureStretches || i < share.count;
        terms[s] = there ? Elements<T, kEach>::load(sums_of_share + i) : Elements<T, kEach>{};
      }
#pragma unroll
      for (unsigned s = 0; s < kStretches; ++s) add_squares(sums, terms[s]);
#pragma unroll
      for (unsigned block = 0; block < kShares; block += kTellers)
        rounds.tell(block + thread / kColumns, share.block * kColumns + column, sums);
    }
    joined = Vectors<T, Of>::of_share(sums_of_share, place);
  }
  if (thread == 0) {
#pragma unroll
    for (int p = 0; p < kMost; ++p) x.counts[blockIdx.x].of[p] = count[p];
  }
  finish_told(work, row, share, place, rounds, joined, weight, work.quant);
}

// Returns the kernel, or null if there is none.
template <class T, class Framing, int kMost, unsigned kShares, unsigned kMessages>
const void* short_address() {
  if constexpr (is_short(Framing::kBulk, sizeof(T), kMost + 1, kShares, kMessages)) {
    void (*const kernel)(SumAndFinish) = sum_and_finish_short<T, Framing, kMost, kShares, kMessages>;
    return reinterpret_cast<const void*>(kernel);
  }
  return nullptr;
}
template <class T, class Framing, int kMost, unsigned kMessages>
const void* short_of_shares(unsigned shares) {
  switch (shares) {
    case 1: return short_address<T, Framing, kMost, 1, kMessages>();
    case 2: return short_address<T, Framing, kMost, 2, kMessages>();
    case 4: return short_address<T, Framing, kMost, 4, kMessages>();
    default: return short_address<T, Framing, kMost, 8, kMessages>();
  }
}
template <class T, class Framing, int kMost>
const void* short_of_messages(unsigned shares, unsigned messages) {
  if (messages == 1) return short_of_shares<T, Framing, kMost, 1>(shares);
  return messages == 2 ? short_of_shares<T, Framing, kMost, 2>(shares) : nullptr;
}
template <class T, class Framing>
const void* short_of_ranks(int ranks, unsigned shares, unsigned messages) {
  if (ranks <= 2) return short_of_messages<T, Framing, 1>(shares, messages);
  if (ranks <= 4) return short_of_messages<T, Framing, 3>(shares, messages);
  return short_of_messages<T, Framing, kMostPeers>(shares, messages);
}

// Returns the kernel of a framing, or null.
template <class Framing>
const void* short_kernel_of(const Form& form, unsigned shares, unsigned messages) {
  using Of = cuda::Whole<Framing>;
  if (!form.whole) return nullptr;
  if (form.dtype == DType::f32) return short_of_ranks<float, Of>(form.ranks, shares, messages);
  if (form.dtype == DType::f16) return short_of_ranks<F16, Of>(form.ranks, shares, messages);
  return short_of_ranks<BF16, Of>(form.ranks, shares, messages);
}

}  // namespace
}  // namespace unisono::fused::gpu
