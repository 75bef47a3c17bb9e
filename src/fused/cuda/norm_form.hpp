// Which form a norm on GPU memory takes, and how a kernel cuts it: alike on all ranks. Plain C++, so that a
// machine without a GPU tests it.
#pragma once

#include <cstddef>

#include "core/plan.hpp"
#include "fused/cuda/norm.hpp"
#include "fused/task.hpp"

namespace unisono::fused {

// The limits that the GPUs of all ranks set to a kernel.
struct Gpus {
  std::size_t most_blocks;
  bool clusters, nvlink;
};

// The shape of one kernel for a call.
struct Cut {
  bool lines, two_steps;
  std::size_t steps;      // as SumAndFinish has them
  std::size_t at_a_time;  // rows that a cluster finishes in a step: one of each owner
  unsigned cluster, bits, row_bytes;
  int threads;              // of a block
  std::size_t piece_bytes;  // of a message
  std::size_t teams;        // clusters
  unsigned messages;        // of a share
  bool in_registers;        // a kernel holds the rows there, if they are whole
};

Cut cut_of(const Task& task, const Gpus& gpus, Algorithm algorithm);

// Returns whether a call has a place for the sums of an all_reduce of its own: an output with as many bytes,
// which is no input of what follows.
bool can_run_apart(const Task& task);

// Returns whether a kernel may hold rows in registers, if they are whole.
bool short_rows(const NormCall& call, host::Norm kind);

// Returns the bytes of a share of a row in shared memory, if those of `rows` rows fit; else 0.
unsigned held_bytes(const Task& task, unsigned elements, std::size_t rows);

// Returns the algorithm of a call: packets or lines in one kernel, or any other for the calls apart. planned:
// of an automatic call.
Algorithm algorithm_of(const Task& task, const Gpus& gpus, Algorithm planned);

inline bool runs_apart(Algorithm algorithm) { return !is_packets(algorithm) && !is_lines(algorithm); }

}  // namespace unisono::fused
