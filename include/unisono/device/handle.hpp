// The handle of a device area (unisono/device/area.hpp): plain data, which a user's own kernel takes by
// value. The functions on a handle are in unisono/device/verbs.cuh. For host and device, from
// C++17 on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono::device {

inline constexpr int kMostRanks = 72;  // GPUs of one NVLink domain
inline constexpr int kAnyRank = -1;    // a wait is for no rank in particular

// A counter that any rank raises and its owner waits for. Each is in a sector of memory of its own, so that
// two of them do not contend.
struct alignas(32) Signal {
  std::uint32_t count;  // how often it was raised; wraps
  std::uint32_t taken;  // how much of that `take` has taken; the owner's alone
};

// Whether a communicator has failed: a part of every rank's memory that all ranks reach.
struct Status {
  std::uint32_t failed;   // some rank has failed: waits end early, also those of later kernels
  std::uint32_t claimed;  // which thread of this rank writes the record
};

// The record of a wait that has failed. One for each rank, in pinned memory of the host that the device has
// mapped.
struct Failure {
  std::uint32_t stage;    // 0: none, 2: readable (written last, with release at system scope)
  std::uint32_t cut;      // kernels of this rank have left work undone, since some rank has failed
  std::uint32_t yes = 1;  // to be copied from
  std::int32_t rank, peer, slot, block;
  std::uint32_t expected, seen;
  std::uint32_t collective;  // of a call of the library's own
  std::uint64_t call;        // which of the communicator's
  std::uint32_t area;        // the number of the area whose kernel has waited; 0: a call of the library's own
  // 0: a wait has expired. Otherwise what a kernel of the library's own says of its call; `call`, `seen` and
  // `expected` are then its numbers.
  std::uint32_t problem;
};

// Take it as `const __grid_constant__ unisono::device::Handle`: a kernel that copies it needs as much local
// memory for every thread.
struct Handle {
  std::int32_t rank, ranks;
  std::int32_t area;         // its number within the communicator, from 1
  std::int32_t signals;      // how many each rank has
  std::uint64_t bytes;       // of each rank's memory
  std::uint64_t timeout_ns;  // the deadline of every wait
  Failure* failure;          // this rank's
  // Every rank's, as this device has them mapped. A rank's memory begins at a multiple of 256 bytes.
  void* memory[kMostRanks];
  Signal* signal[kMostRanks];
  Status* status[kMostRanks];
};
static_assert(sizeof(Handle) <= 2048, "two handles and more fit in a kernel's parameters of 4 KB");

}  // namespace unisono::device
