// Which program runs a call: a table, measured, that `unisono tune` replaces by one of the machine at hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/traits.hpp"
#include "unisono/types.hpp"

namespace unisono {

// How a GPU's kernel is cut. Zeros: the backend decides.
struct Shape {
  static constexpr int kMostThreads = 512;  // of a block
  int blocks = 0, threads = 0;
  std::size_t piece_bytes = 0;  // what a block takes up at once
};
// Throws UsageError if no kernel can be cut so. who: the begin of the error's text.
void check_shape(const Shape& shape, const std::string& who);

class Plan {
 public:
  struct Entry {
    Collective collective;
    // Whether every buffer is symmetric. On plain memory direct needs ranks that can copy from each other's.
    // On GPUs send_recv and all_to_all_v have one list for both, that of plain memory.
    bool symmetric;
    // The bytes of the call's larger buffer; the first entry with enough counts. In an all_to_all_v on GPUs
    // they are a message's: messages go directly or not by their own sizes, and those of each kind by the
    // last entry of that kind, since they are one kernel's.
    std::size_t up_to_bytes;
    Algorithm algorithm;
    Shape shape{};  // on a GPU
  };

  // For host memory.
  struct Host {
    int ranks;
    int ranks_a_core = 1;      // that take turns on it
    bool cached = false;       // chunks go through the cache
    bool one_process = false;  // plain memory is reached like symmetric memory
    // The kernel's copies between processes take less than two through a chunk, from small pages too.
    bool kernel_fast = false;
    bool lets_go = false;                       // writers let go of the lines of small pieces (host/move.hpp)
    static constexpr std::size_t kPacket = 56;  // bytes of data
  };
  static Plan of_host(const Host& host);
  static Plan of_fabric();
  static Plan of_fabric_gpu();  // for GPU memory, which one algorithm of one collective takes
  // For memory of GPUs named `card` (cudaDeviceProp::name): the table of src/core/plans/ for it, or for the
  // card that all tables are of by default, with the fewest ranks from `ranks` on, else the most. Borders of
  // one step are moved by the peers.
  static Plan of_gpu(std::string_view card, int ranks);
  static bool has_table(std::string_view card);  // one of its own: all such cards are joined by NVLink
  // For more GPUs of one machine than packets, lines and copy engines take.
  static Plan of_many_gpus(int ranks);
  static Plan of_nodes() { return Plan(Level::nodes); }  // empty: nodes/sums.hpp chooses by what links carry
  static Plan of_gpu_over_pcie(int ranks);               // to each other's memory, or through the host's

  // Replaces the entries of each (collective, symmetric) that `entries` has. Throws UsageError if a
  // collective has not the algorithm that an entry gives it.
  void set(const std::vector<Entry>& entries);
  // Returns the algorithm of a call. bytes: of a batch_send_recv, and on GPUs of an all_to_all_v, those of
  // one message; there `symmetric` says whether receivers may tell of their memory.
  Algorithm choose(Collective collective, std::size_t bytes, bool symmetric) const;
  // Returns the algorithm that the table has for such a call; automatic: none.
  Algorithm listed(Collective collective, std::size_t bytes, bool symmetric) const {
    const Entry* found = find(collective, bytes, symmetric);
    return found ? found->algorithm : Algorithm::automatic;
  }
  // Returns the shape that the table gives such a call by that algorithm.
  Shape shape(Collective collective, std::size_t bytes, bool symmetric, Algorithm algorithm) const;

  // Returns the algorithm whose program takes any size and any pointer.
  static Algorithm staged(Collective collective) {
    using enum Collective;
    return collective == all_reduce || collective == all_reduce_rms_norm ? Algorithm::two_shot
                                                                         : Algorithm::push;
  }
  // Returns the program over chunks of a call on CPUs that the plan lets go directly, and that does not. Two
  // ranks carry as much in one step as in two, which make each sum once.
  static Algorithm staged(Collective collective, int ranks, std::size_t bytes) {
    constexpr std::size_t kOneStep = std::size_t{64} << 10;
    const bool in_one = collective == Collective::all_reduce && ranks == 2 && bytes <= kOneStep;
    return in_one ? Algorithm::one_shot : staged(collective);
  }

  // Returns whether a call may name that algorithm; returns all such algorithms.
  static bool has(Collective collective, Algorithm algorithm, Level level);
  static std::vector<Algorithm> algorithms(Collective collective, Level level);

 private:
  explicit Plan(Level level) : level_(level) {}
  void add(const Entry& entry) { range(entry.collective, entry.symmetric).push_back(entry); }
  const Entry* find(Collective collective, std::size_t bytes, bool symmetric) const;
  const Entry* of_messages(bool direct) const;  // on GPUs
  Level level_;
  std::vector<Entry>& range(Collective collective, bool symmetric) {
    return entries_[static_cast<int>(collective)][symmetric];
  }
  std::vector<Entry> entries_[kCollectives][2];
};

}  // namespace unisono
