// Lines, in which the low-latency kernels send rows: 128 bytes, of which eight lanes store 120 of data, and
// the phase's number as flag. A warp has four lines at once. A receiver polls the line itself: no signal
// follows it.
#pragma once

#include "cuda/device/memory.cuh"
#include "moe/cuda/segments.cuh"

namespace unisono::moe::gpu {

using cuda::Packet;

inline constexpr unsigned kLanesOfLine = 8;
inline constexpr unsigned kLinesOfWarp = 32 / kLanesOfLine;
inline constexpr int kStepsOfUnit = 4;  // of a warp, for the codes of a unit
// Steps of a warp whose lines are loaded at once. kWide: rows are read and written by words of 8 bytes.
template <bool kWide>
inline constexpr int kStepsAtOnce = kWide ? 4 : 1;

// Returns whether this lane has the last part of a line: a word, and the flag.
__device__ inline bool ends_line() { return lane() % kLanesOfLine == kLanesOfLine - 1; }
// Returns the line of this lane in a step of its warp, and the first of the two words that it has there.
__device__ inline unsigned line_of(unsigned step) { return step * kLinesOfWarp + lane() / kLanesOfLine; }
__device__ inline unsigned word_of(unsigned line) {
  return line * static_cast<unsigned>(kWordsOfLine) + lane() % kLanesOfLine * 2;
}
__device__ inline Packet* packet_of(byte* lines, unsigned line) {
  return reinterpret_cast<Packet*>(lines + std::size_t{line} * kLine) + lane() % kLanesOfLine;
}

// Returns a warp's number among those of some blocks, this block being the block-th of them. Few items go to
// as many SMs: the warps of one share its issue slots.
__device__ inline unsigned spread_warp(unsigned block = blockIdx.x, unsigned blocks = gridDim.x) {
  return warp_of_block() * blocks + block;
}

// The number of a kernel's phase, from 1, alike to all threads of all blocks. The blocks count themselves in
// the word's low bits, and the last one moves it on. It comes while a block does other work: each warp asks
// for it once.
class Phase {
 public:
  // begins: the kernel begins the phase; otherwise one before it has.
  __device__ Phase(unsigned long long* word, bool begins) : word_(word), begins_(begins) {
    if (threadIdx.x == kTeller) seen_ = begins ? atomicAdd(word, 1ull) : *word;
  }
  // Returns the number once all warps of the block have asked.
  __device__ std::uint64_t number() const {
    __shared__ std::uint64_t number;
    if (threadIdx.x == kTeller) {
      if (begins_ && (seen_ & ((1ull << kBlockBits) - 1)) == gridDim.x - 1)
        atomicAdd(word_, (1ull << kBlockBits) - gridDim.x);
      number = (seen_ >> kBlockBits) + (begins_ ? 1 : 0);
    }
    asm volatile("barrier.sync 1, %0;" ::"n"(kThreads) : "memory");
    return number;
  }

 private:
  static constexpr int kBlockBits = 16;
  static constexpr unsigned kTeller = kThreads - 32;  // of the last warp, which waits for nothing else
  unsigned long long* word_;
  bool begins_;
  unsigned long long seen_ = 0;
};

// Waits until a warp's lines have come, one for each place that is not null, and loads them. All lanes of a
// line have a place, or none. from: the lane's source. Returns false, alike to the warp, if it has failed.
template <int kCount>
__device__ inline bool take_lines(const Work& work, Packet* const (&at)[kCount], std::uint64_t phase,
                                  Told kind, int from, Packet (&out)[kCount]) {
  std::uint64_t began = 0;
  for (std::uint32_t polls = 1;; ++polls) {
    bool complete = true;
    __syncwarp();  // a line is loaded by one instruction: flag and data are of one time
#pragma unroll
    for (int u = 0; u < kCount; ++u)
      if (at[u]) out[u] = cuda::load_packet(at[u]);
#pragma unroll
    for (int u = 0; u < kCount; ++u)
      if (at[u] && ends_line() && out[u].high != phase) complete = false;
    const unsigned late = __ballot_sync(kAllLanes, !complete);
    if (late == 0) return true;
    if (polls % device::kLook != 0) continue;
    const int rank = __shfl_sync(kAllLanes, from, __ffs(static_cast<int>(late)) - 1);
    bool goes_on = true;
    if (lane() == 0)
      goes_on = device::patient(device::detail::Wait{work.area, slot_of(work.dims, kind, rank), rank}, began,
                                static_cast<std::uint32_t>(phase), static_cast<std::uint32_t>(phase - 1));
    if (!__shfl_sync(kAllLanes, goes_on, 0)) return false;
  }
}

template <class Grain>
__device__ inline std::uint64_t load_grains(const byte* at, std::uint32_t bytes) {
  std::uint64_t word = 0;
#pragma unroll
  for (unsigned i = 0; i < 8 / sizeof(Grain); ++i)
    if (i * sizeof(Grain) < bytes)
      word |= std::uint64_t{reinterpret_cast<const Grain*>(at)[i]} << 8 * i * sizeof(Grain);
  return word;
}
template <class Grain>
__device__ inline void store_grains(byte* at, std::uint64_t word, std::uint32_t bytes) {
#pragma unroll
  for (unsigned i = 0; i < 8 / sizeof(Grain); ++i)
    if (i * sizeof(Grain) < bytes)
      reinterpret_cast<Grain*>(at)[i] = static_cast<Grain>(word >> 8 * i * sizeof(Grain));
}

// Loads and stores a word of 8 bytes of a row of `bytes` bytes; of one behind the row's end nothing. grain:
// bytes of the widest word by which the row can be copied: 16, 4, 2 or 1.
__device__ inline std::uint64_t load_word(const byte* row, unsigned word, std::uint32_t bytes, int grain) {
  if (std::size_t{word} * 8 >= bytes) return 0;
  const byte* const at = row + std::size_t{word} * 8;
  if (grain == 16) return *reinterpret_cast<const std::uint64_t*>(at);
  const std::uint32_t left = bytes - word * 8;
  if (grain == 4) return load_grains<std::uint32_t>(at, left);
  return grain == 2 ? load_grains<std::uint16_t>(at, left) : load_grains<std::uint8_t>(at, left);
}
__device__ inline void store_word(byte* row, unsigned word, std::uint32_t bytes, int grain,
                                  std::uint64_t value) {
  if (std::size_t{word} * 8 >= bytes) return;
  byte* const at = row + std::size_t{word} * 8;
  const std::uint32_t left = bytes - word * 8;
  if (grain == 16) *reinterpret_cast<std::uint64_t*>(at) = value;
  else if (grain == 4) store_grains<std::uint32_t>(at, value, left);
  else if (grain == 2) store_grains<std::uint16_t>(at, value, left);
  else store_grains<std::uint8_t>(at, value, left);
}

// A row among those of several ranks, one rank after another, from the one after `last` on.
struct RowOf {
  __device__ RowOf(const std::uint32_t* rows, int ranks, int last, unsigned number) : position(number) {
    source = last;
#pragma unroll 1
    for (int i = 0; i < ranks; ++i) {
      source = source + 1 == ranks ? 0 : source + 1;
      if (position < rows[source]) break;
      position -= rows[source];
    }
  }
  int source;
  unsigned position;
};

}  // namespace unisono::moe::gpu
