// Kernels for the bench, apart from the programs: they measure links between GPUs, and start timed work
// together. Every function enqueues on the stream and returns CUDA's code of the launch (0: success).
// Addresses lie in memory that the stream's GPU reaches: its own, or a peer's with peer access on.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace unisono::cuda::links {

using Stream = CUstream_st*;

inline constexpr int kThreads = 512;               // of a block in load and store
inline constexpr std::size_t kStageBytes = 16384;  // of one bulk copy
inline constexpr int kStages = 8;                  // bulk copies under way in a block

// Holds the stream until the word at `flag` is at least `value`, or deadline_s has passed.
// flag: in host memory that the GPU has mapped. Its difference to `value` is compared, so it may wrap.
int hold(Stream stream, const std::uint32_t* flag, std::uint32_t value, double deadline_s);

// Reads `bytes` by 16-byte loads of `blocks` blocks, and writes next to nothing.
// bytes and address: multiples of 16. sink: 16 bytes of the GPU's own, which one value of the data writes.
int load(Stream stream, const void* from, std::size_t bytes, void* sink, int blocks);

// Writes `bytes` by 16-byte stores of `blocks` blocks, and reads nothing. bytes and address: multiples of 16.
int store(Stream stream, void* to, std::size_t bytes, int blocks);

// Copies `bytes` through shared memory by bulk copies, with one thread a block.
// bytes: a multiple of kStageBytes; addresses: multiples of 16. Returns cudaErrorNotSupported below sm_90.
int bulk_copy(Stream stream, void* to, const void* from, std::size_t bytes, int blocks);

// Sends a flag to a peer and back `rounds` times, by one thread on either side, without ordering other
// accesses. Requires: both sides call it at the same time, each on its own GPU.
// mine: a word of this GPU; theirs: the word that the other side passes as `mine`; both begin as 0.
// first: whether this side starts. *elapsed_ns (on this GPU, or mapped host memory) gets the GPU's
// nanoseconds for all rounds, or 0 if deadline_s has passed.
int round_trips(Stream stream, std::uint32_t* mine, std::uint32_t* theirs, bool first, std::uint32_t rounds,
                std::uint64_t* elapsed_ns, double deadline_s);

}  // namespace unisono::cuda::links
