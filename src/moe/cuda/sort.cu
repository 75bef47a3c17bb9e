// Sorts received rows by expert, if some of the rows that peers have sent were left out. One block does so.
#include <cuda_runtime.h>

#include "cuda/api.hpp"
#include "moe/cuda/device.cuh"
#include "moe/cuda/launch.hpp"

namespace unisono::moe::gpu {
namespace {

// The entries of topk_idx that a warp has.
struct Entries {
  __device__ explicit Entries(const Work& work) : k(static_cast<std::size_t>(work.dims.top_k)) {
    const std::size_t all = static_cast<std::size_t>(*table<std::int32_t>(work, work.space.rows)) * k;
    const std::size_t share = round_up((all + kWarps - 1) / kWarps, 32);
    first = min(warp_of_block() * share, all);
    end = min(first + share, all);
    experts = table<std::int32_t>(work, work.space.topk_idx);
  }
  __device__ std::int32_t load(std::size_t i) const { return i < end ? experts[i] : kNone; }
  std::size_t k, first, end;
  const std::int32_t* experts;
};

// Sets counts and offsets, and leaves in `warps` where each warp's first pair of an expert goes.
__device__ void lay_out(const Work& work, std::int32_t* warps) {
  const int local = work.dims.local_experts;
  auto* const counts = table<std::int32_t>(work, work.space.counts);
  auto* const offsets = table<std::int32_t>(work, work.space.offsets);
  for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) {
    std::int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const std::int32_t of_warp = warps[w * local + e];
      warps[w * local + e] = sum;
      sum += of_warp;
    }
    counts[e] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    offsets[0] = 0;
    for (int e = 0; e < local; ++e) offsets[e + 1] = offsets[e] + counts[e];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * local; i += kThreads)
    warps[i] += offsets[i % local];
}

__global__ void __launch_bounds__(kThreads) sort_kernel(const __grid_constant__ Work work) {
  extern __shared__ std::int32_t warps[];
  if (failed(work)) return;
  const int local = work.dims.local_experts;
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * local; i += kThreads) warps[i] = 0;
  __syncthreads();
  const Entries entries(work);
  std::int32_t* const mine_of_warp = warps + warp_of_block() * local;
  for (std::size_t i = entries.first + lane(); i < entries.end; i += 32)
    if (const std::int32_t e = entries.load(i); e != kNone) atomicAdd(mine_of_warp + e, 1);
  __syncthreads();
  lay_out(work, warps);
  __syncthreads();
  auto* const expert_rows = table<std::int32_t>(work, work.space.expert_rows);
  for (std::size_t first = entries.first; first < entries.end; first += 32) {
    const std::size_t i = first + lane();
    const std::int32_t e = entries.load(i);
    const unsigned alike =
        __match_any_sync(kAllLanes, e == kNone ? 0x80000000u | lane() : static_cast<unsigned>(e));
    const int before = __popc(alike & ((1u << lane()) - 1));
    if (e != kNone) expert_rows[mine_of_warp[e] + before] = static_cast<std::int32_t>(i / entries.k);
    __syncwarp();
    if (e != kNone && before == 0) mine_of_warp[e] += __popc(alike);
    __syncwarp();
  }
}

std::size_t shared_bytes(int local_experts) {
  return static_cast<std::size_t>(kWarps * local_experts) * sizeof(std::int32_t);
}

}  // namespace

void load_sort() { cuda::load_with_shared(reinterpret_cast<const void*>(sort_kernel)); }

cudaError_t sort(const Work& work, cudaStream_t stream) {
  sort_kernel<<<1, kThreads, shared_bytes(work.dims.local_experts), stream>>>(work);
  return cudaGetLastError();
}

}  // namespace unisono::moe::gpu
