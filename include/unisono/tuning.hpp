// Which algorithms the calls of a communicator take, and how its kernels are cut.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "unisono/communicator.hpp"
#include "unisono/types.hpp"

namespace unisono {

// One row of a plan: the algorithm of a collective for calls whose larger buffer has at most `up_to_bytes`.
struct PlanEntry {
  Collective collective;
  bool symmetric;           // every buffer is from Communicator::empty
  std::size_t up_to_bytes;  // the first row that is not too small counts
  std::string_view algorithm;
  // The kernel's blocks, the threads of a block, and the bytes that a block takes up at once. Zero: the
  // library decides.
  int blocks = 0, threads = 0;
  std::size_t piece_bytes = 0;
};

// The plan of a communicator, which must live longer. Every rank makes the same changes between the same
// calls. Throws UsageError for what the communicator does not have.
class UNISONO_API Tuning {
 public:
  explicit Tuning(Communicator& communicator) : impl_(*communicator.impl_) {}

  // Returns the algorithm of a call whose larger buffer has `bytes` bytes. wire: of an all_reduce.
  std::string_view plan(Collective collective, std::size_t bytes, bool symmetric,
                        Memory memory = Memory::host, bool in_place = false, Wire wire = Wire::exact) const;
  // Returns the SMs of a GPU that the largest kernel of such a call takes. 0: copy engines do all of the
  // call.
  int sms(Collective collective, std::size_t bytes, bool symmetric, std::string_view algorithm,
          bool in_place = false) const;

  // Returns how the kernel's copies between the processes of this rank's node compare with two copies through
  // a chunk, by which the host's built-in plan goes: "fast" or "slow", as measured by the first communicator
  // of these processes. "none": ranks of one process, another lane, or a kernel that allows no such copies.
  std::string_view kernel_copies() const;

  // Replaces the plan of every (collective, symmetric) that `entries` has. Across nodes, host and device are
  // the plans within this rank's node.
  void set_plan(const std::vector<PlanEntry>& entries, Level level = Level::host);
  // Cuts the kernels of all later calls so, for measurements. Zeros: the library decides.
  void set_shape(int blocks, int threads, std::size_t piece_bytes);
  // Cuts the kernels of all later calls by the plan again.
  void reset_shape();

 private:
  Communicator::Impl& impl_;
};

}  // namespace unisono
