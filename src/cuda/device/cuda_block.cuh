// The CUDA lane of up to kFewRanks ranks (of more: many_block.cuh). One thread block is one worker of its
// rank. Block b of a rank speaks with block b of every other.
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

// Reduction: the operation of a move with several sources (cuda::Bytes, cuda::ByTable or cuda::Inline), or of
// a requantise (cuda::Quantised). Messages of packets are in exchange.cuh.
template <class Reduction>
class CudaBlock {
 public:
  static constexpr std::uint32_t kChunks = cuda::kChunks;
  static constexpr bool kPulls = false;  // over NVLink stores beat loads
  static constexpr bool kMulticasts = true;
  static constexpr bool kLinked = true;

  // The arrays of `sources` and `destinations`. They lie apart, so that the lane's members stay in registers.
  struct Arrays {
    const byte* sources[cuda::kFewRanks];
    Dst destinations[cuda::kFewRanks];
  };

  // Loads the block's counters, which the last kernel has stored; `finish` stores them again.
  __device__ CudaBlock(const cuda::Context& context, Arrays& arrays, const Reduction& reduction)
      : context_(context),
        arrays_(arrays),
        reduction_(reduction),
        warps_(static_cast<int>(blockDim.x) / 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        thread_(static_cast<int>(threadIdx.x) % 32) {
    for (int peer = warp_; peer < size(); peer += warps_) spoken_to_ |= 1u << peer;
    if (thread_ < size()) mine_ = *counters(thread_);
    failed_ = cuda::load_relaxed(&cuda::header(context_, rank())->failed) != 0;
  }
  __device__ void finish() {
    await();
    failed_ = __syncthreads_or(failed_) != 0;  // every warp has loaded the counters
    if (failed_) withdraw();
    if (warp_ == 0 && thread_ < size()) *counters(thread_) = mine_;
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
    if (thread_ != rank()) ++mine_.signalled[static_cast<int>(slot)];
  }

  // Only notes the wait. A verb that depends on it first awaits all noted waits. Each warp does so for
  // itself, and its thread p polls for peer p, so that waits for several peers overlap.
  __device__ void wait(int peer, Slot slot) {
    if (waiting_ >> peer & 1u) await();
    waiting_ |= 1u << peer;
    if (thread_ != peer) return;
    expected_ = ++mine_.awaited[static_cast<int>(slot)];
    waits_on_ = slot;
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
    return of(peer, mine_.signalled[static_cast<int>(slot)]);
  }
  __device__ std::uint32_t awaited(int peer, Slot slot) const {
    return of(peer, mine_.awaited[static_cast<int>(slot)]);
  }

  // Return chunk `index` of this rank's ring in the peer's memory, and of the peer's ring in mine.
  __device__ byte* chunk_at(int peer, std::uint32_t index, std::size_t) const {
    return chunk(peer, rank(), index);
  }
  __device__ const byte* chunk_from(int peer, std::uint32_t index, std::size_t) const {
    return chunk(rank(), peer, index);
  }

  // Return arrays of size() pointers, valid until the next such call. Each thread has its own.
  __device__ const byte** sources() { return arrays_.sources; }
  __device__ Dst* destinations() { return arrays_.destinations; }

  __device__ void settle() {
    await();
    if (!moved_) return;
    failed_ = __syncthreads_or(failed_) != 0;
    moved_ = false;
  }

 private:
  __device__ void await() {
    if (!waiting_) return;
    bool lost = false;
    if (waiting_ >> thread_ & 1u && !failed_)
      lost = !cuda::await(&flag(rank(), waits_on_, thread_)->count, expected_,
                          cuda::Wait{context_, thread_, waits_on_});
    failed_ = __any_sync(0xffffffffu, lost || failed_) != 0;
    __syncwarp();  // all of the warp may read what a thread has acquired
    waiting_ = 0;
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
    const std::uint32_t count = of(peer, mine_.signalled[static_cast<int>(slot)]) + 1;
    if (thread_ == peer) ++mine_.signalled[static_cast<int>(slot)];
    return count;
  }

  // Returns thread peer's `value`. Counters are the same in every warp: its thread p keeps those of peer p.
  template <class U>
  __device__ static U of(int peer, U value) {
    return __shfl_sync(0xffffffffu, value, peer);
  }

  // Returns whether this thread signals the peer. Peers are spread over the warps: threads of one warp would
  // wait for each other.
  __device__ bool speaks_to(int peer) const { return thread_ == 0 && (spoken_to_ >> peer & 1u) != 0; }

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

  const cuda::Context& context_;
  Arrays& arrays_;
  Reduction reduction_;
  int warps_, warp_, thread_;
  cuda::Counters mine_{};
  unsigned spoken_to_ = 0;      // bit p: this warp sends the block's signals to peer p
  bool failed_;                 // this warp has met a failure; the block's barriers tell the other warps
  bool moved_ = false;          // since the last of these barriers
  unsigned waiting_ = 0;        // bit p: a wait for peer p is noted
  Slot waits_on_ = Slot::meet;  // the slot that this thread polls, and the count
  std::uint32_t expected_ = 0;
};

}  // namespace unisono
