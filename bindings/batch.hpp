// The messages of a batch_send_recv, as Python passes them.
#pragma once

#include <utility>
#include <vector>

#include "any_argument.hpp"
#include "arguments.hpp"
#include "array.hpp"
#include "unisono/communicator.hpp"

namespace unisono::python {

using Messages = std::vector<std::pair<nb::object, RankNumber>>;

// The arrays of a batch, and their messages for the core. Throws UsageError unless all arrays are on the CPU,
// or all on the GPU.
struct Batch {
  Batch(const Messages& sends, const Messages& receives, int size);
  std::vector<Array> arrays;
  std::vector<Communicator::Outgoing> outgoing;
  std::vector<Communicator::Incoming> incoming;
};

}  // namespace unisono::python
