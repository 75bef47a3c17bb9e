// Memory and signals of every GPU for kernels of the user's own.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "unisono/communicator.hpp"
#include "unisono/device/handle.hpp"
#include "unisono/version.hpp"

namespace unisono {

// An area of the same size on every rank's GPU: memory, and signals that begin at zero. Kernels take its
// handle by value, and work on the area by unisono/device/verbs.cuh.
//
// Order: the area is apart from the communicator's calls. Its kernels neither wait for them nor are waited
// for, except by streams. The memory may be the buffer of a call, without a copy. A kernel that waits for a
// peer's must be loaded before (cudaFuncGetAttributes), and all its blocks must be resident at once.
//
// Failure: one with the communicator. A wait that expires fails the communicator on every rank; a rank that
// is lost ends the waits.
class UNISONO_API DeviceArea {
 public:
  // Collective, in the order of the communicator's calls; waits for the GPU. name: of what its kernels do,
  // for the text of errors. Requires: every rank asks for the same `bytes` and `signals`. Throws UsageError
  // if the communicator has no GPU, is on several nodes, or its GPUs are not joined by NVLink. Throws
  // ResourceError on every rank if one has no memory for it.
  DeviceArea(Communicator& communicator, std::size_t bytes, int signals, const std::string& name = {});

  // Valid until the area or the communicator is destroyed, whichever is first.
  const device::Handle& handle() const { return handle_; }
  // Returns this rank's part of the memory, zeroed when it was made.
  void* local() const { return handle_.memory[handle_.rank]; }
  std::size_t bytes() const { return handle_.bytes; }
  int signals() const { return handle_.signals; }

 private:
  std::shared_ptr<void> memory_;
  device::Handle handle_;
};

}  // namespace unisono
