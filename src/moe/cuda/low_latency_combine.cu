// Combine of few tokens, in one kernel. Ranks store what they have summed as lines into slots at the tokens'
// owner, which adds it up by rank as it comes.
#include <cuda_runtime.h>

#include "moe/cuda/launch.hpp"
#include "moe/cuda/lines.cuh"
#include "moe/cuda/sums.cuh"

namespace unisono::moe::gpu {
namespace {

constexpr int kPartsAhead = 2;  // of a token, whose lines are under way at once
constexpr int kSteps = 2;       // of a warp, for each of them
constexpr int kWords = 2 * kSteps;

// A lane's words in a step of its warp, and the steps after it.
struct Words {
  std::uint64_t of[kWords];
};

template <int kGrain>
__device__ Words load_words(const byte* row, std::uint32_t bytes, unsigned step) {
  Words words;
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    words.of[i] = load_word(row, word_of(line_of(step + i / 2)) + i % 2, bytes, kGrain);
  return words;
}

// A sum of words, element by element. Of a word alone it keeps the bits.
template <class T>
struct WordSum {
  static constexpr int kEach = static_cast<int>(sizeof(std::uint64_t) / sizeof(T));
  using Vector = Pack<T, kEach>;

  __device__ void add(const Words& words) {
    each([&](int i) { sums[i].add(std::bit_cast<Vector>(words.of[i])); });
    last = words;
    ++count;
  }
  __device__ void add(const Words& words, float weight) {
    each([&](int i) { sums[i].add(std::bit_cast<Vector>(words.of[i]), weight); });
    count = 2;
  }
  __device__ Words result() const {
    Words words{};
    if (count == 1) return last;
    if (count > 0) each([&](int i) { words.of[i] = std::bit_cast<std::uint64_t>(sums[i].rounded()); });
    return words;
  }
  template <class Body>
  __device__ static void each(const Body& body) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) body(i);
  }

  Sum<T, kEach> sums[kWords];
  Words last{};
  int count = 0;
};

// Returns this rank's part of a token: the sum of its rows.
template <class T, int kGrain>
__device__ Words sum_rows(const Rows& rows, int count, bool weighted, std::uint32_t bytes, unsigned step) {
  constexpr int kAhead = 4;  // rows that are loaded before the first is added
  if (count == 1 && !weighted) return load_words<kGrain>(rows.at[0], bytes, step);
  WordSum<T> sum;
  for (int first = 0; first < count; first += kAhead) {
    Words some[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (first + u < count) some[u] = load_words<kGrain>(rows.at[first + u], bytes, step);
    if (weighted) Rows::await_weights();
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (first + u >= count) continue;
      if (weighted) sum.add(some[u], rows.weights[first + u]);
      else sum.add(some[u]);
    }
  }
  return sum.result();
}

__device__ byte* slot_of_sum(const Work& work, std::uint64_t phase, int owner, int from, unsigned position) {
  return at<byte>(work, owner, work.space.few_sums_of(phase)) +
         (from * work.space.few_sums_tokens + position) * work.space.sum_lines * kLine;
}

template <class T, int kGrain>
__device__ void push_rows(const Work& work, const Combine& combine, const std::uint32_t* tokens, Rows& rows,
                          std::uint64_t phase) {
  const Dims& d = work.dims;
  unsigned all = 0;
  for (int s = 0; s < d.ranks; ++s) all += s == d.rank ? 0 : tokens[s];
  const auto lines = static_cast<unsigned>(lines_of(combine.bytes));
  const Segments share(all);
  for (unsigned item = warp_of_grid(); item < share.items; item += warps_of_grid()) {
    const RowOf which(tokens, d.ranks, d.rank, item / share.each);
    const float* const weights = weights_of(work, combine, which.source);
    const int count = find_rows(work, combine, which.source, which.position, weights, rows);
    byte* const to = slot_of_sum(work, phase, which.source, d.rank, which.position);
    const Steps part(lines, kLinesOfWarp, item % share.each, share.each);
    for (unsigned step = part.first; step < part.end; step += kSteps) {
      const Words words = sum_rows<T, kGrain>(rows, count, weights != nullptr, combine.bytes, step);
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kSteps; ++u)
        if (const unsigned line = line_of(step + u); step + u < part.end && line < lines)
          cuda::store_packet(packet_of(to, line),
                             {words.of[2 * u], ends_line() ? phase : words.of[2 * u + 1]});
    }
  }
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
__device__ bool sum_tokens(const Work& work, const Combine& combine, Parts& parts, Rows& rows,
                           std::uint64_t phase) {
  const std::uint32_t bytes = combine.bytes;
  const auto lines = static_cast<unsigned>(lines_of(bytes));
  const float* const weights = weights_of(work, combine, work.dims.rank);
  const Segments share(work.tokens);
  // From the last warp on: the first ones push.
  for (unsigned item = warps_of_grid() - 1 - warp_of_grid(); item < share.items; item += warps_of_grid()) {
    const unsigned token = item / share.each;
    int own_rows = 0;
    const int count = find_parts(work, combine, token, phase, weights, parts, rows, own_rows);
    const Steps part(lines, kLinesOfWarp, item % share.each, share.each);
    for (unsigned step = part.first; step < part.end; step += kSteps) {
      Words bias{};
      if (combine.bias) bias = load_words<kGrain>(combine.bias + std::size_t{token} * bytes, bytes, step);
      const Words own = sum_rows<T, kGrain>(rows, own_rows, weights != nullptr, bytes, step);
      WordSum<T> sum;
      for (int first = 0; first < count; first += kPartsAhead) {
        Packet* places[kPartsAhead * kSteps];
        Packet packets[kPartsAhead * kSteps];
#pragma unroll
        for (int i = 0; i < kPartsAhead * kSteps; ++i) {
          const int p = first + i / kSteps;
          const unsigned line = line_of(step + i % kSteps);
          const bool comes = p < count && parts.at[p] && step + i % kSteps < part.end && line < lines;
          places[i] = comes ? packet_of(parts.at[p], line) : nullptr;
        }
        if (!take_lines(work, places, phase, Told::few_summed, parts.late(first, count), packets))
          return false;
#pragma unroll
        for (int u = 0; u < kPartsAhead; ++u) {
          if (first + u >= count) continue;
          Words words = own;
          if (parts.at[first + u]) {
#pragma unroll
            for (int i = 0; i < kWords; ++i)
              words.of[i] = i % 2 == 0 ? packets[u * kSteps + i / 2].low : packets[u * kSteps + i / 2].high;
          }
          sum.add(words);
        }
      }
      if (combine.bias) sum.add(bias);
      const Words result = sum.result();
      byte* const out = combine.out + std::size_t{token} * bytes;
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        if (step + i / 2 < part.end && (i % 2 == 0 || !ends_line()))
          store_word(out, word_of(line_of(step + i / 2)) + i % 2, bytes, kGrain, result.of[i]);
    }
  }
  return true;
}

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads)
    low_latency_combine_kernel(const __grid_constant__ Work work, const __grid_constant__ Combine combine) {
  constexpr int kGrain = kWide ? 16 : static_cast<int>(sizeof(T));
  __shared__ Rows all_rows[kWarps];
  __shared__ Parts all_parts[kWarps];
  __shared__ std::uint32_t tokens[device::kMostRanks];
  const Dims& d = work.dims;
  // By other threads than the one that looks for the phase, which would wait for its load.
  if (const int s = static_cast<int>(threadIdx.x) - 32; s >= 0 && s < d.ranks)
    tokens[s] =
        s == d.rank ? 0 : static_cast<std::uint32_t>(table<std::int32_t>(work, work.space.source_rows)[s]);
  const std::uint64_t phase = phase_of(work, counters(work).phases + 1, combine.push);
  if (phase == 0) return;
  const auto begun = static_cast<std::uint32_t>(phase);
  Rows& rows = all_rows[warp_of_block()];
  if (combine.push) {
    if (blockIdx.x == 0)
      for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += kThreads)
        if (r != d.rank)
          device::store_relaxed(&work.area.signal[r][slot_of(d, Told::few_summed, d.rank)].count, begun);
    push_rows<T, kGrain>(work, combine, tokens, rows, phase);
  }
  if (!combine.sum || !sum_tokens<T, kGrain>(work, combine, all_parts[warp_of_block()], rows, phase)) return;
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

}  // namespace

cudaError_t load_low_latency_combine() {
  cudaFuncAttributes attributes;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const bool wide : {false, true})
      if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel_of(dtype, wide));
          error != cudaSuccess)
        return error;
  return cudaSuccess;
}

cudaError_t low_latency_combine(const Work& work, const Combine& combine, int blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<Work*>(&work), const_cast<Combine*>(&combine)};
  return cudaLaunchKernel(kernel_of(combine.dtype, combine.wide), dim3(static_cast<unsigned>(blocks)),
                          dim3(kThreads), parameters, 0, stream);
}

}  // namespace unisono::moe::gpu
