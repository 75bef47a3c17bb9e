// The CUDA lane. One thread block is one worker of its rank. Block b of a rank speaks with block b of every
// other.
//
// Every thread of the block calls every verb, in the same order. Each warp waits for itself. Warps meet
// before the block tells of what all of them have moved: at a signal, or at settle().
#pragma once

#include <type_traits>

#include "cuda/device/memory.cuh"
#include "cuda/device/reduction.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/layout.hpp"
#include "lane/lane.hpp"

namespace unisono {
namespace cuda {

// A set of up to kMost peers: bit p % 32 of word p / 32. Unsigned, since nvcc 13.0 crashes at signed
// divisions here.
template <int kMost>
struct PeerSet {
  static constexpr int kWords = (kMost + 31) / 32;

  __device__ PeerSet() { clear(); }
  __device__ void clear() {
    for (unsigned& one : words) one = 0;
  }
  __device__ static unsigned word(int peer) { return kWords == 1 ? 0 : static_cast<unsigned>(peer) / 32; }
  __device__ static unsigned bit(int peer) {
    return kWords == 1 ? static_cast<unsigned>(peer) : static_cast<unsigned>(peer) % 32;
  }
  __device__ void add(int peer) { words[word(peer)] |= 1u << bit(peer); }
  __device__ bool has(int peer) const { return (words[word(peer)] >> bit(peer) & 1u) != 0; }
  __device__ bool any() const {
    unsigned all = 0;
    for (const unsigned one : words) all |= one;
    return all != 0;
  }

  unsigned words[kWords];
};

// The arrays of `sources` and `destinations`, a thread's own. They lie apart from the lane, so that its
// members stay in registers.
template <int kMost>
struct BlockArrays {
  __device__ const byte** sources() { return sources_; }
  __device__ Dst* destinations() { return destinations_; }

 private:
  const byte* sources_[kMost];
  Dst destinations_[kMost];
};

// Those for more ranks are a warp's, in shared memory: a thread's own would be more local memory than it has
// by default. All threads of a warp write the same.
template <>
struct BlockArrays<kMaxRanks> {
  __device__ BlockArrays() : of_warp_(arrays_of_warp()) {}
  __device__ const byte** sources() {
    __syncwarp();  // no thread still reads what they held
    return of_warp_.sources;
  }
  __device__ Dst* destinations() {
    __syncwarp();
    return of_warp_.destinations;
  }

 private:
  struct OfWarp {
    const byte* sources[kMaxRanks];
    Dst destinations[kMaxRanks];
  };
  static_assert(sizeof(OfWarp) % sizeof(uint4) == 0);
  __device__ static OfWarp& arrays_of_warp() {
    __shared__ uint4 of_warps[kMaxThreads / 32][sizeof(OfWarp) / sizeof(uint4)];
    return *reinterpret_cast<OfWarp*>(of_warps[threadIdx.x / 32]);
  }

  OfWarp& of_warp_;
};

}  // namespace cuda

// kMost: ranks; kFewRanks or kMaxRanks. Reduction: the operation of a move with several sources (cuda::Bytes,
// cuda::ByTable, cuda::ByTableOfMany or cuda::Inline), or of a requantise (cuda::Quantised). Messages of
// packets are in exchange.cuh.
template <int kMost, class Reduction>
class CudaBlock {
 public:
  static constexpr std::uint32_t kChunks = cuda::kChunks;
  static constexpr bool kPulls = false;  // over NVLink stores beat loads
  static constexpr bool kMulticasts = true;
  static constexpr bool kLinked = true;

  using Arrays = cuda::BlockArrays<kMost>;

  // Loads the block's counters, which the last kernel has stored; `finish` stores them again.
  __device__ CudaBlock(const cuda::ContextOf<kMost>& context, Arrays& arrays, const Reduction& reduction)
      : context_(context),
        arrays_(arrays),
        reduction_(reduction),
        warps_(static_cast<int>(blockDim.x) / 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        thread_(static_cast<int>(threadIdx.x) % 32) {
    for (int peer = warp_; peer < size(); peer += warps_) spoken_to_.add(peer);
    for (int w = 0; w < kWords; ++w) mine_[w] = kept(w) < size() ? *counters(kept(w)) : cuda::Counters{};
    failed_ = cuda::load_relaxed(&cuda::header(context_, rank())->failed) != 0;
  }
  __device__ void finish() {
    await();
    failed_ = __syncthreads_or(failed_) != 0;  // every warp has loaded the counters
    if (failed_) withdraw();
    for (int w = 0; w < kWords; ++w)
      if (warp_ == 0 && kept(w) < size()) *counters(kept(w)) = mine_[w];
  }

  __device__ int rank() const { return context_.rank; }
  __device__ int size() const { return context_.layout.ranks; }
  __device__ int worker() const { return static_cast<int>(blockIdx.x); }
  __device__ int workers() const { return static_cast<int>(gridDim.x); }
  __device__ std::size_t chunk_bytes() const { return context_.layout.chunk_bytes; }
  __device__ static constexpr bool streams_chunk(int, std::size_t bytes) { return bytes >= 2048; }
  __device__ std::size_t piece_bytes() const { return context_.piece_bytes; }
  __device__ std::size_t tile_bytes() const { return context_.piece_bytes; }

  __device__ void move(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes) {
    await();
    if (bytes == 0) return;
    moved_ = true;
    if (failed_) return;
    if constexpr (std::is_same_v<Reduction, cuda::Bytes>) cuda::copy(dsts, n_dsts, srcs[0], bytes);
    else if (n_srcs == 1) cuda::copy(dsts, n_dsts, srcs[0], bytes);
    else reduction_(dsts, n_dsts, srcs, n_srcs, bytes);
  }

  __device__ void requantise(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, Plain plain,
                             std::size_t count) {
    await();
    if (count == 0) return;
    moved_ = true;
    if (!failed_) reduction_.requantise(dsts, n_dsts, srcs, n_srcs, plain, count);
  }
  __device__ static constexpr std::size_t element_bytes() { return Reduction::kElementBytes; }

  // Signals with a release, which waits for all that the SM has under way. Credit needs none, nor has NCCL's:
  // it says that what was read may be overwritten, and a value that has been used has been read.
  __device__ void signal(int peer, Slot slot) {
    settle();
    const std::uint32_t count = next_signal(peer, slot);
    if (failed_ || !speaks_to(peer)) return;
    std::uint32_t* const at = &flag(peer, slot, rank())->count;
    if (slot == Slot::chunk_credit) cuda::store_relaxed(at, count);
    else cuda::store_release(at, count);
  }
  // Signals all peers without a release: the end of a kernel has published what it wrote. The flag is
  // incremented in the peer's memory, so that no counter need be loaded. GPUs without NVLink cannot do that
  // to each other's memory, and signal.
  __device__ void announce(Slot slot) {
    if (!context_.counts_up) {
      for (int i = 1; i < size(); ++i) signal(peer_at(*this, i), slot);
      return;
    }
    for (int i = 1; i < size(); ++i)
      if (const int peer = peer_at(*this, i); speaks_to(peer))
        cuda::increment_relaxed(&flag(peer, slot, rank())->count);
    for (int w = 0; w < kWords; ++w)
      if (kept(w) != rank()) ++mine_[w].signalled[static_cast<int>(slot)];
  }

  // Only notes the wait. A verb that depends on it first awaits all noted waits. Each warp does so for
  // itself, and its thread p % 32 polls for peer p, so that waits for several peers overlap.
  __device__ void wait(int peer, Slot slot) {
    if (waiting_.has(peer)) await();
    waiting_.add(peer);
    const unsigned w = Peers::word(peer);
    if (kept(w) != peer) return;
    expected_[w] = ++mine_[w].awaited[static_cast<int>(slot)];
    waits_on_[w] = slot;
  }
  // Signals with an address, for which wait_note waits.
  __device__ void signal_note(int peer, Slot slot, byte* address) {
    if (speaks_to(peer)) cuda::store_relaxed(&flag(peer, slot, rank())->address, address);
    signal(peer, slot);
  }
  __device__ byte* wait_note(int peer, Slot slot) {
    wait(peer, slot);
    await();
    return cuda::load_relaxed(&flag(rank(), slot, peer)->address);
  }
  __device__ std::uint32_t signalled(int peer, Slot slot) const {
    return of(peer, counters_of(peer).signalled[static_cast<int>(slot)]);
  }
  __device__ std::uint32_t awaited(int peer, Slot slot) const {
    return of(peer, counters_of(peer).awaited[static_cast<int>(slot)]);
  }

  // Return chunk `index` of this rank's ring in the peer's memory, and of the peer's ring in mine.
  __device__ byte* chunk_at(int peer, std::uint32_t index, std::size_t) const {
    return chunk(peer, rank(), index);
  }
  __device__ const byte* chunk_from(int peer, std::uint32_t index, std::size_t) const {
    return chunk(rank(), peer, index);
  }

  // Return arrays of size() pointers, valid until the next such call.
  __device__ const byte** sources() { return arrays_.sources(); }
  __device__ Dst* destinations() { return arrays_.destinations(); }

  __device__ void settle() {
    await();
    if (!moved_) return;
    failed_ = __syncthreads_or(failed_) != 0;
    moved_ = false;
  }

 private:
  using Peers = cuda::PeerSet<kMost>;
  static constexpr int kWords = Peers::kWords;

  // Returns the peer whose counters this thread keeps in word w.
  __device__ int kept(int w) const { return 32 * w + thread_; }

  __device__ void await() {
    if (!waiting_.any()) return;
    bool lost = false;
    for (int w = 0; w < kWords; ++w)
      if (waiting_.words[w] >> thread_ & 1u && !failed_ && !lost)
        lost = !cuda::await(&flag(rank(), waits_on_[w], kept(w))->count, expected_[w],
                            cuda::WaitOf<kMost>{context_, kept(w), waits_on_[w]});
    failed_ = __any_sync(0xffffffffu, lost || failed_) != 0;
    __syncwarp();  // all of the warp may read what a thread has acquired
    waiting_.clear();
  }

  // Marks the rank's results as unusable. Sets the peers' flags far back, so that no later kernel's
  // announce() makes up for signals that this block has not sent.
  __device__ void withdraw() {
    cuda::store_relaxed(&context_.failure->cut, 1);
    for (int i = 1; i < size(); ++i) {
      const int peer = peer_at(*this, i);
      const std::uint32_t behind = signalled(peer, Slot::meet) - (1u << 30);
      if (speaks_to(peer)) cuda::store_relaxed(&flag(peer, Slot::meet, rank())->count, behind);
    }
  }

  __device__ std::uint32_t next_signal(int peer, Slot slot) {
    const std::uint32_t count = signalled(peer, slot) + 1;
    const unsigned w = Peers::word(peer);
    if (kept(w) == peer) ++mine_[w].signalled[static_cast<int>(slot)];
    return count;
  }

  // Returns the value of the thread that keeps the peer's counters. They are the same in every warp: its
  // thread p % 32 keeps those of peer p.
  __device__ static std::uint32_t of(int peer, std::uint32_t value) {
    return __shfl_sync(0xffffffffu, value, peer);
  }
  __device__ const cuda::Counters& counters_of(int peer) const { return mine_[Peers::word(peer)]; }

  // Returns whether this thread signals the peer. Peers are spread over the warps: threads of one warp would
  // wait for each other.
  __device__ bool speaks_to(int peer) const { return thread_ == 0 && spoken_to_.has(peer); }

  __device__ byte* at(int owner, std::size_t offset) const { return context_.bases[owner] + offset; }
  __device__ std::size_t pair(int writer) const {
    return static_cast<std::size_t>(worker()) * size() + writer;
  }
  __device__ cuda::Flag* flag(int owner, Slot slot, int writer) const {
    return reinterpret_cast<cuda::Flag*>(at(owner, context_.layout.flags)) + pair(writer) * kSlots +
           static_cast<int>(slot);
  }
  __device__ byte* chunk(int owner, int writer, std::uint32_t index) const {
    return at(owner, context_.layout.chunks) + (pair(writer) * kChunks + index) * chunk_bytes();
  }
  __device__ cuda::Counters* counters(int peer) const {
    return reinterpret_cast<cuda::Counters*>(at(rank(), context_.layout.counters)) + pair(peer);
  }

  const cuda::ContextOf<kMost>& context_;
  Arrays& arrays_;
  Reduction reduction_;
  int warps_, warp_, thread_;
  cuda::Counters mine_[kWords];
  Peers spoken_to_;        // the peers to which this warp sends the block's signals
  bool failed_;            // this warp has met a failure; the block's barriers tell the other warps
  bool moved_ = false;     // since the last of these barriers
  Peers waiting_;          // the peers for which a wait is noted
  Slot waits_on_[kWords];  // the slots that this thread polls, and the counts
  std::uint32_t expected_[kWords];
};

}  // namespace unisono
