// The engines, which run a Moe's phases: over the memory of one machine (host_engine.cpp), by messages
// (message_engine.cpp) or on GPUs (cuda/engine.cpp).
#pragma once

#include <memory>

#include "core/backend.hpp"
#include "moe/dims.hpp"
#include "unisono/moe.hpp"

namespace unisono::moe {

// Calls come within a turn of the communicator (Impl::turn), alike on every rank, and have passed the checks
// of Moe. slot: where a routing is kept, from 0 to dims.handles - 1.
class Engine {
 public:
  virtual ~Engine() = default;
  // routed: the slot has the routing already, and `tokens.topk_idx` is not read. whole: the end follows at
  // once, and its work may be done here. tokens.row_bytes: of a row of x as it travels. tokens.max_tokens is
  // set.
  virtual void begin_dispatch(const MoeTokens& tokens, int slot, bool routed, bool whole) = 0;
  // Fills in all but the handle.
  virtual void end_dispatch(MoeReceived& received) = 0;
  virtual void begin_combine(const MoeOutputs& outputs, int slot, bool whole) = 0;
  virtual void end_combine() = 0;
};

// Each is collective and takes turns of its own. `impl` outlives the engine.
std::unique_ptr<Engine> make_host_engine(Communicator::Impl& impl, const Dims& dims);
std::unique_ptr<Engine> make_message_engine(Communicator::Impl& impl, const Dims& dims);
// Throws UsageError without GPUs that reach each other.
std::unique_ptr<Engine> make_gpu_engine(Communicator::Impl& impl, const Dims& dims, bool host_counts);

}  // namespace unisono::moe
