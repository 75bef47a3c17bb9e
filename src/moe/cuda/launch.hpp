// The kernels of a Moe, and how they are started.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/cuda/layout.hpp"

namespace unisono::moe::gpu {

// Returns the shared memory that the kernel of routes needs.
std::size_t route_shared_bytes(const Space& space);

// Load all kernels, so that none is loaded while another one waits for this rank. blocks: of the kernel of
// rows, as many as an SM runs at once. bulk: rows can go by bulk copies.
std::size_t load_route();  // returns the most shared memory that its launch may ask for
void load_sort();
void load_dispatch(const Dims& dims, int& blocks, bool& bulk);
void load_combine(const Dims& dims, int& blocks);

// Reads topk_idx, [tokens, top_k] of type `index`, into the call's slot, and tells the peers.
cudaError_t route(const Work& work, const void* topk_idx, DType index, int blocks, cudaStream_t stream);
// Sends rows to the places where they belong.
cudaError_t send(const Work& work, const Dispatch& dispatch, int blocks, cudaStream_t stream);
// Waits for the rows of all peers, and copies what belongs to several experts or beside the pool.
cudaError_t land(const Work& work, const Dispatch& dispatch, int blocks, cudaStream_t stream);
// Sorts received rows by expert. Flat rows need that if some were left out.
cudaError_t sort(const Work& work, cudaStream_t stream);
// Makes the steps of a combine that `combine` names.
cudaError_t combine(const Work& work, const Combine& combine, int blocks, cudaStream_t stream);

// The dispatch of some tokens, by one kernel that reads routes and sends rows.
std::size_t at_once_shared_bytes(const Dims& dims, const Space& space);
void load_at_once(const Dims& dims, const Space& space);
cudaError_t dispatch_at_once(const Work& work, const Dispatch& dispatch, int blocks, cudaStream_t stream);

// The low-latency forms: one kernel for all of a dispatch or combine, or one for each of its two steps.
std::size_t low_latency_shared_bytes(const Dims& dims, const Space& space);
void load_low_latency_dispatch(const Dims& dims);
void load_low_latency_combine();
cudaError_t low_latency_dispatch(const Work& work, const Dispatch& dispatch, int blocks, cudaStream_t stream);
cudaError_t low_latency_combine(const Work& work, const Combine& combine, int blocks, cudaStream_t stream);

}  // namespace unisono::moe::gpu
