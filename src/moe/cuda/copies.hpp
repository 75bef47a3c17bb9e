// Counts of a Moe's routings that the host knows, and the copies that it can make therefore: kernels leave
// rows in this rank's memory, and copy engines bring them to the peers while other kernels have the SMs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moe/cuda/layout.hpp"

namespace unisono::moe {

// Rows that follow each other: the positions of a peer's tokens here, or of this rank's there.
struct Positions {
  std::size_t first = 0, count = 0;
};

class Copies {
 public:
  // Makes what calls need, on the current GPU. work: outlives this object.
  explicit Copies(const gpu::Work& work);

  // Enqueues the copy of the counts of the routing that `work` has, whose kernel is on the stream. `keep`
  // reads them when the stream has come there.
  void load(cudaStream_t stream);
  void keep(int slot);

  // Return this rank's tokens that a peer gets, and a peer's that this rank has got, of the chunks that are
  // copied at once, from this one on. Tokens that were left out are not among them.
  Positions to(int slot, int peer, std::uint32_t chunk) const;
  Positions from(int slot, int peer, std::uint32_t chunk) const;
  // Return the first row of this rank's tokens at a peer, and of a peer's here.
  std::size_t first_there(int slot, int peer) const { return of(slot).first_there[at(peer)]; }
  std::size_t first_here(int slot, int peer) const { return of(slot).first_here[at(peer)]; }
  std::size_t rows(int slot) const { return of(slot).rows; }

  // Lets the copies that follow wait for what the stream has, and the stream for all copies.
  void follow(cudaStream_t stream);
  void join(cudaStream_t stream);
  // Copies to a peer's memory.
  void copy(void* to, const void* from, std::size_t bytes);
  // Sets a signal of that kind at a peer, when the copies before it have come.
  void signal(gpu::Told kind, int peer, std::uint32_t count);

 private:
  struct Counts {
    std::vector<std::uint32_t> sent, come;                          // [ranks, chunks]
    std::vector<std::uint32_t> first_there, first_here, rows_here;  // [ranks]
    std::size_t rows = 0;
  };
  const Counts& of(int slot) const { return kept_[at(slot)]; }
  Positions of_chunks(std::span<const std::uint32_t> counts, int peer, std::uint32_t chunk,
                      std::size_t kept) const;

  struct Free {
    void operator()(void* pinned) const { cudaFreeHost(pinned); }
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  template <class T>
  using Held = std::unique_ptr<T, Free>;

  const gpu::Work& work_;
  std::vector<Counts> kept_;    // of each slot
  Held<std::uint32_t> loaded_;  // pinned: sent, come, and the tables from source_rows on
  Held<CUstream_st> stream_;
  Held<CUevent_st> reached_;
};

}  // namespace unisono::moe
