// Combine of few tokens, in one kernel. Ranks store what they have summed as lines into slots at the tokens'
// owner, which adds it up by rank as it comes.
#include <cuda_runtime.h>

#include "cuda/api.hpp"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/lines.cuh"
#include "moe/cuda/sums.cuh"

namespace unisono::moe::gpu {
namespace {

constexpr int kPartsAhead = 2;  // of a token, whose lines are under way at once

// A lane's words in a step of its warp.
struct Words {
  std::uint64_t of[2];
};

template <int kGrain>
__device__ Words load_words(const byte* row, std::uint32_t bytes, unsigned step) {
  const unsigned word = word_of(line_of(step));
  return {{load_word(row, word, bytes, kGrain), load_word(row, word + 1, bytes, kGrain)}};
}

// A sum of words, element by element.
template <class T>
struct WordSum {
  static constexpr int kEach = static_cast<int>(sizeof(std::uint64_t) / sizeof(T));
  using Vector = Pack<T, kEach>;

  __device__ void add(const Words& words) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i].add(std::bit_cast<Vector>(words.of[i]));
  }
  __device__ void add(const Words& words, float weight) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i].add(std::bit_cast<Vector>(words.of[i]), weight);
  }
  __device__ Words rounded() const {
    return {
        {std::bit_cast<std::uint64_t>(sums[0].rounded()), std::bit_cast<std::uint64_t>(sums[1].rounded())}};
  }

  Sum<T, kEach> sums[2];
};

constexpr int kRowsAhead = 8;  // that a warp loads before it adds the first

// A warp's words of some rows, in shared memory, where they come by themselves. A loop over rows in registers
// would be unrolled, and a kernel of few tokens runs each instruction once: it would wait for most of them.
struct Held {
  // Begins to load a lane's words of a step of a row.
  template <int kGrain>
  __device__ void take(int place, const byte* row, std::uint32_t bytes, unsigned step) {
    const unsigned word = word_of(line_of(step));
    if constexpr (kGrain == 16) {
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        const bool there = (word + i) * 8 < bytes;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(
                         static_cast<std::uint32_t>(__cvta_generic_to_shared(&words[place][lane()].of[i]))),
                     "l"(there ? row + (word + i) * 8 : row), "r"(there ? 8 : 0)
                     : "memory");
      }
    } else {
      words[place][lane()] = load_words<kGrain>(row, bytes, step);
    }
  }
  Words words[kRowsAhead][32];
};

// Returns this rank's part of a token: the sum of its rows; of one without a weight its bits.
template <class T, int kGrain>
__device__ Words sum_rows(const Rows& rows, Held& held, int count, bool weighted, std::uint32_t bytes,
                          unsigned step) {
  if (count == 0) return {};
  if (count == 1 && !weighted) return load_words<kGrain>(rows.at[0], bytes, step);
  WordSum<T> sum;
  for (int first = 0; first < count; first += kRowsAhead) {
    const int some = min(count - first, kRowsAhead);
#pragma unroll 1
    for (int u = 0; u < some; ++u) held.take<kGrain>(u, rows.at[first + u], bytes, step);
    Rows::await();
#pragma unroll 1
    for (int u = 0; u < some; ++u) sum.add(held.words[u][lane()], weighted ? rows.weights[first + u] : 1.0f);
  }
  return sum.rounded();
}

__device__ byte* slot_of_sum(const Work& work, std::uint64_t phase, int owner, int from, unsigned position) {
  return at<byte>(work, owner, work.space.few_sums_of(phase)) +
         (from * work.space.few_sums_tokens + position) * work.space.sum_lines * kLine;
}

// Returns the phase's number, if this warp has needed it; else 0.
template <class T, int kGrain>
__device__ std::uint64_t push_rows(const Work& work, const Combine& combine, const std::uint32_t* tokens,
                                   Rows& rows, Held& held, const Phase& phase_to_come) {
  const Dims& d = work.dims;
  std::uint64_t phase = 0;
  unsigned all = 0;
#pragma unroll 1
  for (int s = 0; s < d.ranks; ++s) all += s == d.rank ? 0 : tokens[s];
  const unsigned lines = combine.lines;
  const Segments share(all);
  for (unsigned item = spread_warp(); item < share.items; item += warps_of_grid()) {
    const RowOf which(tokens, d.ranks, d.rank, share.row_of(item));
    const float* const weights = weights_of(work, combine, which.source);
    const int count = find_rows(work, combine, which.source, which.position, weights, rows);
    const Steps part(lines, kLinesOfWarp, share.segment_of(item), share);
    for (unsigned step = part.first; step < part.end; ++step) {
      const Words words = sum_rows<T, kGrain>(rows, held, count, weights != nullptr, combine.bytes, step);
      if (phase == 0) phase = phase_to_come.number();  // while rows are loaded
      byte* const to = slot_of_sum(work, phase, which.source, d.rank, which.position);
      __syncwarp();
      if (const unsigned line = line_of(step); line < lines)
        cuda::store_packet(packet_of(to, line), {words.of[0], ends_line() ? phase : words.of[1]});
    }
  }
  return phase;
}

// The parts of a token, by rank: where they come; null: this rank's own.
struct Parts {
  // Returns a rank, for the text of an error, whose part is among those from `first` on.
  __device__ int late(int first, int count) const {
    return at[first] || first + 1 == count ? ranks[first] : ranks[first + 1];
  }
  byte* at[kMostTopK];
  int ranks[kMostTopK];
};

__device__ int find_parts(const Work& work, const Combine& combine, unsigned token, std::uint64_t phase,
                          const float* weights, Parts& parts, Rows& rows, int& own_rows) {
  const Dims& d = work.dims;
  const auto k = static_cast<unsigned>(d.top_k);
  const std::int32_t packed =
      lane() < k ? table<std::int32_t>(work, work.space.homes)[std::size_t{token} * k + lane()] : kNone;
  const Home home(packed);
  const bool own = packed != kNone && home.rank == d.rank;
  __syncwarp();
  if (packed != kNone) {
    parts.ranks[lane()] = home.rank;
    parts.at[lane()] =
        own ? nullptr : slot_of_sum(work, phase, d.rank, home.rank, static_cast<unsigned>(home.position));
  }
  const unsigned owns = __ballot_sync(kAllLanes, own);
  own_rows = 0;
  if (owns != 0) {
    const int position = __shfl_sync(kAllLanes, home.position, __ffs(static_cast<int>(owns)) - 1);
    own_rows = find_rows(work, combine, d.rank, static_cast<unsigned>(position), weights, rows);
  }
  __syncwarp();
  return __popc(__ballot_sync(kAllLanes, packed != kNone));
}

template <class T, int kGrain>
__device__ bool sum_tokens(const Work& work, const Combine& combine, Parts& parts, Rows& rows, Held& held,
                           std::uint64_t phase) {
  const std::uint32_t bytes = combine.bytes;
  const unsigned lines = combine.lines;
  const float* const weights = weights_of(work, combine, work.dims.rank);
  const Segments share(work.tokens);
  // From the last warp on: the first ones push.
  for (unsigned item = warps_of_grid() - 1 - spread_warp(); item < share.items; item += warps_of_grid()) {
    const unsigned token = share.row_of(item);
    int own_rows = 0;
    const int count = find_parts(work, combine, token, phase, weights, parts, rows, own_rows);
    const Steps part(lines, kLinesOfWarp, share.segment_of(item), share);
    for (unsigned step = part.first; step < part.end; ++step) {
      const unsigned line = line_of(step);
      Words bias{};
      if (combine.bias) bias = load_words<kGrain>(combine.bias + std::size_t{token} * bytes, bytes, step);
      const Words own = sum_rows<T, kGrain>(rows, held, own_rows, weights != nullptr, bytes, step);
      WordSum<T> sum;
      Words words{};
      for (int first = 0; first < count; first += kPartsAhead) {
        Packet* places[kPartsAhead];
        Packet packets[kPartsAhead];
#pragma unroll
        for (int u = 0; u < kPartsAhead; ++u) {
          const bool comes = first + u < count && parts.at[first + u] && line < lines;
          places[u] = comes ? packet_of(parts.at[first + u], line) : nullptr;
        }
        if (!take_lines(work, places, phase, Told::few_summed, parts.late(first, count), packets))
          return false;
#pragma unroll
        for (int u = 0; u < kPartsAhead; ++u) {
          if (first + u >= count) break;
          words = parts.at[first + u] ? Words{{packets[u].low, packets[u].high}} : own;
          sum.add(words);
        }
      }
      if (combine.bias) sum.add(bias);
      // a part alone keeps its bits, and none is zeros
      if (count > 1 || combine.bias) words = sum.rounded();
      byte* const out = combine.out + std::size_t{token} * bytes;
      store_word(out, word_of(line), bytes, kGrain, words.of[0]);
      if (!ends_line()) store_word(out, word_of(line) + 1, bytes, kGrain, words.of[1]);
    }
  }
  return true;
}

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads)
    low_latency_combine_kernel(const __grid_constant__ Work work, const __grid_constant__ Combine combine) {
  constexpr int kGrain = kWide ? 16 : static_cast<int>(sizeof(T));
  extern __shared__ Held all_held[];
  __shared__ Rows all_rows[kWarps];
  __shared__ Parts all_parts[kWarps];
  __shared__ std::uint32_t tokens[device::kMostRanks];
  const Dims& d = work.dims;
  const Phase phase_to_come(&counters(work).phases[1], combine.push);
  if (const unsigned s = threadIdx.x; s < static_cast<unsigned>(d.ranks))
    tokens[s] = static_cast<int>(s) == d.rank
                    ? 0
                    : static_cast<std::uint32_t>(table<std::int32_t>(work, work.space.source_rows)[s]);
  if (failed(work)) return;
  Rows& rows = all_rows[warp_of_block()];
  Held& held = all_held[warp_of_block()];
  std::uint64_t phase = 0;
  if (combine.push) phase = push_rows<T, kGrain>(work, combine, tokens, rows, held, phase_to_come);
  if (phase == 0) phase = phase_to_come.number();
  const auto begun = static_cast<std::uint32_t>(phase);
  if (combine.push && blockIdx.x == 0)
    for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += kThreads)
      if (r != d.rank)
        device::store_relaxed(&work.area.signal[r][slot_of(d, Told::few_summed, d.rank)].count, begun);
  if (!combine.sum || !sum_tokens<T, kGrain>(work, combine, all_parts[warp_of_block()], rows, held, phase))
    return;
  // A peer that has begun has read what came two phases before.
  if (blockIdx.x == 0)
    for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += kThreads)
      if (r != d.rank) device::thread_wait(work.area, slot_of(d, Told::few_summed, r), begun, r);
}

template <class T>
const void* kernel_of(bool wide) {
  return wide ? reinterpret_cast<const void*>(low_latency_combine_kernel<T, true>)
              : reinterpret_cast<const void*>(low_latency_combine_kernel<T, false>);
}
const void* kernel_of(DType dtype, bool wide) {
  if (dtype == DType::f32) return kernel_of<float>(wide);
  return dtype == DType::f16 ? kernel_of<F16>(wide) : kernel_of<BF16>(wide);
}

constexpr std::size_t kHeldBytes = kWarps * sizeof(Held);

}  // namespace

void load_low_latency_combine() {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const bool wide : {false, true}) cuda::load_with_shared(kernel_of(dtype, wide));
}

cudaError_t low_latency_combine(const Work& work, const Combine& combine, int blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<Work*>(&work), const_cast<Combine*>(&combine)};
  return cudaLaunchKernel(kernel_of(combine.dtype, combine.wide), dim3(static_cast<unsigned>(blocks)),
                          dim3(kThreads), parameters, kHeldBytes, stream);
}

}  // namespace unisono::moe::gpu
