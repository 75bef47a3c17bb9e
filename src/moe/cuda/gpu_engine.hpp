// The engine on GPUs: the memory that every rank's kernels reach, and the launches.
//
// A call only enqueues. What a rank counts lies in its GPU's memory, therefore a CUDA graph of calls may be
// replayed, and calls outside of it may come between. The slot of a routing and the epoch of received rows
// are fixed when a call is made. A graph's dispatch therefore writes the same slot and epoch at each replay,
// as though it were made again. No rank writes rows of a dispatch before every rank has begun that dispatch,
// on its stream. Received rows are therefore valid until a dispatch begins that has the same epoch: the
// second after this one in the order in which calls were made, or a replay of one that was made so. With
// host_counts a dispatch waits for the counts of its routing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/api.hpp"
#include "moe/cuda/copies.hpp"
#include "moe/cuda/launch.hpp"
#include "moe/engine.hpp"

namespace unisono::moe {

inline constexpr int kBlocksOfFew =
    64;  // so that some send while others tell, and some push while others sum
inline constexpr std::size_t kEntries = std::size_t{4} * gpu::kThreads;  // of tables, that a block fills

inline std::uintptr_t number(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

class GpuEngine final : public Engine {
 public:
  GpuEngine(Communicator::Impl& impl, const Dims& dims, bool host_counts);
  void begin_dispatch(const MoeTokens& tokens, int slot, bool routed, bool whole) override;
  void end_dispatch(MoeReceived& received) override;
  void begin_combine(const MoeOutputs& outputs, int slot, bool whole) override;
  void end_combine() override;

 private:
  void load(bool copies);
  void lay_payloads(const MoeTokens& tokens);
  std::size_t offset(const void* of_mine) const { return number(of_mine) - number(work_.own); }
  template <class T>
  T* mine(std::size_t offset) const {
    return reinterpret_cast<T*>(work_.own + offset);
  }
  template <class T>
  T* table(std::size_t offset) const {
    return mine<T>(work_.slot + offset);
  }
  // Whether copy engines can bring the rows of the routing's tokens.
  bool many() const { return work_.space.returned > 0 && most_ >= gpu::kManyTokens; }
  // Sends tokens in groups of chunks: copy engines bring one while the next is made ready. Returns y from
  // where it lies.
  void send_by_copies();
  void return_by_copies();
  // Waits for the counts of a routing whose kernel is on the stream.
  void know_counts();
  // Compares the ranks' dispatches, in a communicator that checks calls. Waits for the ranks' hosts.
  void compare(const MoeTokens& tokens, int slot, bool routed);
  // A routing that is kept: this rank's tokens, and the most of any rank.
  struct Routing {
    std::uint32_t tokens = 0;
    std::size_t most = 0;
  };
  // Begins a call on its stream.
  void take(int slot);
  // Returns the blocks of a kernel that moves rows. With one rank nothing waits: as many as there is room
  // for.
  int blocks(int of_sm) const { return work_.dims.ranks == 1 ? sms_ * of_sm : most_blocks_; }
  // Returns how many blocks have work if each takes `each` items. Few blocks meet sooner than many.
  static int blocks_of(std::size_t items, std::size_t each) {
    return static_cast<int>(std::clamp<std::size_t>((items + each - 1) / each, 1, 1 << 16));
  }
  int blocks_to_route() const;
  int blocks_to_send() const;
  // A token keeps a block busy: its row goes in as many segments as a block has warps.
  int blocks_for_rows() const { return std::min(most_blocks_, blocks_of(rows_to_come(), 1)); }
  std::size_t rows_to_come() const { return most_ * static_cast<std::size_t>(work_.dims.ranks); }
  // Whether the kernels for few tokens run. A row that comes keeps a block busy.
  bool few() const { return most_ <= work_.space.few_tokens; }
  bool at_once() const { return !few() && most_ <= work_.space.at_once_tokens; }
  bool few_sums() const { return most_ <= work_.space.few_sums_tokens; }
  bool lends(const MoeOutputs& outputs) const;
  // Returns how many entries of tables a new routing fills where no token goes.
  std::size_t entries_to_fill() const;
  int blocks_for_few(std::size_t entries = 0) const {
    return std::min(most_blocks_,
                    std::max({kBlocksOfFew, blocks_of(rows_to_come(), 1), blocks_of(entries, kEntries)}));
  }
  void check(cudaError_t result) const { cuda::check(result, "starting a kernel of a moe"); }

  Communicator::Impl& impl_;
  const int device_;
  gpu::Work work_;
  std::shared_ptr<void> memory_;
  int sms_ = 0, send_blocks_ = 1, sum_blocks_ = 1;  // the last two of an SM
  bool bulk_ = false;                               // rows can go by bulk copies
  std::vector<Routing> routings_;                   // of each slot
  std::unique_ptr<Copies> copies_;                  // null: the host is not to know the counts
  std::uint32_t copied_ = 0, returned_ = 0;  // dispatches and combines by copy engines: alike on all ranks

  // of the phase that has begun
  gpu::Dispatch dispatch_;
  gpu::Combine combine_;
  cudaStream_t stream_ = nullptr;
  int slot_ = 0, most_blocks_ = 1;
  std::size_t most_ = 0;  // tokens of any rank
  void* out_ = nullptr;
  bool either_ = false;  // whether tokens of other ranks may have weights
};

}  // namespace unisono::moe
