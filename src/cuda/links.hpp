// What the links between GPUs can do, and a common start for what is timed: kernels for the bench, apart from
// the programs. Every function queues on the stream and returns; a launch that fails is returned as CUDA's
// code (0 is good). Addresses are of memory that the stream's GPU reaches: its own, or a peer's with peer
// access on.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace unisono::cuda::links {

using Stream = CUstream_st*;

inline constexpr int kThreads = 512;               // of a block of load and store
inline constexpr std::size_t kStageBytes = 16384;  // of one bulk copy
inline constexpr int kStages = 8;                  // bulk copies under way in a block

// Holds the stream until the word at `flag`, in host memory that the GPU has mapped, is at least `value` (as
// the difference of the two, so that it may wrap), or deadline_s has passed: it never hangs.
int hold(Stream stream, const std::uint32_t* flag, std::uint32_t value, double deadline_s);

// Reads `bytes` (a multiple of 16, as the address) by 16-byte loads of `blocks` blocks and writes next to
// nothing. `sink`: 16 bytes of the GPU's own, which are written if the data says so.
int load(Stream stream, const void* from, std::size_t bytes, void* sink, int blocks);

// Writes `bytes` (a multiple of 16, as the address) by 16-byte stores of `blocks` blocks and reads nothing.
int store(Stream stream, void* to, std::size_t bytes, int blocks);

// Copies `bytes` (a multiple of kStageBytes, addresses of 16) through shared memory by bulk copies, one
// thread a block. sm_90 and newer; elsewhere it returns cudaErrorNotSupported.
int bulk_copy(Stream stream, void* to, const void* from, std::size_t bytes, int blocks);

// `rounds` trips of a flag to a peer and back, by one thread on either side, without any order of other
// accesses. The two calls run at the same time, each on its own GPU: `mine` is a word of the GPU's own,
// `theirs` the word that the other passes as `mine`; both are 0 before. `first`: this side starts. The GPU's
// nanoseconds for all rounds go to *elapsed_ns (the GPU's own or mapped host memory); 0 where deadline_s has
// passed.
int round_trips(Stream stream, std::uint32_t* mine, std::uint32_t* theirs, bool first, std::uint32_t rounds,
                std::uint64_t* elapsed_ns, double deadline_s);

}  // namespace unisono::cuda::links
