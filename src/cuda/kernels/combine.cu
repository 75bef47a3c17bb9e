// The kernels of sums across nodes: the arithmetic of host::Resume and host::Requantise, bit by bit, over a
// grid of any size.
#include "cuda/combine.hpp"
#include "cuda/device/quantise.cuh"

namespace unisono::cuda {
namespace {

constexpr int kAhead = 4;  // sources that a thread loads before it combines the first of them

// kCount neighbouring elements. Several of them are loaded by words of 16 bytes.
template <class E, std::size_t kCount>
struct alignas(kCount == 1 ? sizeof(E) : sizeof(uint4)) Group {
  E at[kCount];
};

__device__ inline std::size_t thread_of_grid() {
  return static_cast<std::size_t>(blockIdx.x) * kSumThreads + threadIdx.x;
}
__device__ inline std::size_t threads_of_grid() { return static_cast<std::size_t>(gridDim.x) * kSumThreads; }

// Combines `groups` groups from element `begin` on. A thread reads a position of every array before it writes
// there, so that the output may be the prior or a source of the same width.
template <class T, Op op, std::size_t kCount>
__device__ void combine_groups(const CombineTask& task, const byte* const* sources, std::size_t begin,
                               std::size_t groups) {
  using W = typename Wide<T>::type;
  for (std::size_t i = thread_of_grid(); i < groups; i += threads_of_grid()) {
    Group<W, kCount> sum{};
    if (task.prior) sum = reinterpret_cast<const Group<W, kCount>*>(task.prior + begin * sizeof(W))[i];
    bool first = !task.prior;
    for (int s = 0; s < task.n_sources; s += kAhead) {
      Group<T, kCount> next[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
        if (s + u < task.n_sources)
          next[u] = reinterpret_cast<const Group<T, kCount>*>(sources[s + u] + begin * sizeof(T))[i];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (s + u >= task.n_sources) break;
#pragma unroll
        for (std::size_t e = 0; e < kCount; ++e) {
          const W value = Wide<T>::from(next[u].at[e]);
          sum.at[e] = first ? value : unisono::combine<op, T>(sum.at[e], value);
        }
        first = false;
      }
    }
    if (task.ranks == 0) {
      reinterpret_cast<Group<W, kCount>*>(task.out + begin * sizeof(W))[i] = sum;
      continue;
    }
    Group<T, kCount> result;
#pragma unroll
    for (std::size_t e = 0; e < kCount; ++e) result.at[e] = Wide<T>::to(finish<op, T>(sum.at[e], task.ranks));
    reinterpret_cast<Group<T, kCount>*>(task.out + begin * sizeof(T))[i] = result;
  }
}

template <class T, Op op, int kMost>
__global__ void __launch_bounds__(kSumThreads)
    combine_all(const __grid_constant__ CombineTask task, const __grid_constant__ Sources<kMost> sources) {
  constexpr std::size_t kPack = sizeof(uint4) / sizeof(T);
  const std::size_t packs = task.packs ? task.count / kPack : 0;
  combine_groups<T, op, kPack>(task, sources.at, 0, packs);
  combine_groups<T, op, 1>(task, sources.at, packs * kPack, task.count - packs * kPack);
}

// Returns half a block on the wire, combined from all sources. Requires: whole warps call it. A thread that
// is not `mine` has no half, but takes part in its neighbour's.
template <class Code>
__device__ Half sum_of_halves(const RequantiseTask& task, const byte* const* sources, std::size_t i,
                              bool mine, std::size_t scales) {
  float sum[kHalf] = {}, values[kHalf];
  for (int s = 0; s < task.n_sources; s += kAhead) {
    Half next[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      next[u] = {};
      if (mine && s + u < task.n_sources)
        next[u] = {reinterpret_cast<const uint4*>(sources[s + u])[i],
                   static_cast<std::uint32_t>(sources[s + u][scales + i / 2])};
    }
    if (task.n_sources == 1) return next[0];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (s + u >= task.n_sources) break;
      decode<Code>(next[u], values);
#pragma unroll
      for (int e = 0; e < kHalf; ++e) sum[e] = s + u == 0 ? values[e] : sum[e] + values[e];
    }
  }
  if (task.average) {
#pragma unroll
    for (int e = 0; e < kHalf; ++e) sum[e] = sum[e] / static_cast<float>(task.n_sources);
  }
  return encode<Code>(sum);
}

template <class T, class Code, int kMost>
__global__ void __launch_bounds__(kSumThreads)
    requantise_all(const __grid_constant__ RequantiseTask task,
                   const __grid_constant__ Sources<kMost> sources) {
  const std::size_t blocks = wire::blocks_of(task.count), halves = 2 * blocks, scales = blocks * wire::kBlock;
  // whole thread blocks take each round: the halves of a wire block exchange their largest magnitude
  for (std::size_t first = static_cast<std::size_t>(blockIdx.x) * kSumThreads; first < halves;
       first += threads_of_grid()) {
    const std::size_t i = first + threadIdx.x, at = i * kHalf;
    const bool mine = i < halves;
    float values[kHalf] = {};
    Half result;
    if (task.from_elements) {
      if (mine) load_elements<T>(sources.at[0], at, task.count, task.packs, values);
      result = encode<Code>(values);
    } else {
      result = sum_of_halves<Code>(task, sources.at, i, mine, scales);
    }
    if (!mine) continue;
    if (task.to_elements) {
      decode<Code>(result, values);
      store_elements<T>(task.out, at, task.count, task.packs, values);
    } else {
      reinterpret_cast<uint4*>(task.out)[i] = result.codes;
      if (i % 2 == 0) task.out[scales + i / 2] = static_cast<byte>(result.scale);
    }
  }
}

template <class T>
const void* requantise_of(Wire wire, bool many) {
  if (wire == Wire::fp8)
    return many ? reinterpret_cast<const void*>(requantise_all<T, wire::Fp8, kManySources>)
                : reinterpret_cast<const void*>(requantise_all<T, wire::Fp8, kFewSources>);
  return many ? reinterpret_cast<const void*>(requantise_all<T, wire::Int8, kManySources>)
              : reinterpret_cast<const void*>(requantise_all<T, wire::Int8, kFewSources>);
}

}  // namespace

#define UNISONO_FEW(T, op) reinterpret_cast<const void*>(combine_all<T, op, kFewSources>)
#define UNISONO_MANY(T, op) reinterpret_cast<const void*>(combine_all<T, op, kManySources>)

const void* combine_kernel(DType dtype, Op op, bool many) {
  static const void* const few_sources[kDTypes][kOps] = UNISONO_GPU_TABLE(UNISONO_FEW);
  static const void* const many_sources[kDTypes][kOps] = UNISONO_GPU_TABLE(UNISONO_MANY);
  return (many ? many_sources : few_sources)[static_cast<int>(dtype)][static_cast<int>(op)];
}

const void* requantise_kernel(DType dtype, Wire wire, bool many) {
  if (wire == Wire::exact) return nullptr;
  switch (dtype) {
    case DType::f32: return requantise_of<float>(wire, many);
    case DType::f16: return requantise_of<F16>(wire, many);
    case DType::bf16: return requantise_of<BF16>(wire, many);
    default: return nullptr;
  }
}

}  // namespace unisono::cuda
