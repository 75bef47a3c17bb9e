// Parameters of the kernels of a window (unisono/window.hpp). Plain C++: host and device read them alike.
#pragma once

#include <cstdint>

#include "unisono/device/handle.hpp"

namespace unisono::cuda {

// The signals of a window's area: one in which ranks meet, and one for each rank, which that rank alone sets.
inline constexpr int kMeetingSignal = 0;
constexpr int signal_from(int rank) { return 1 + rank; }
constexpr int window_signals(int ranks) { return 1 + ranks; }

struct WindowWait {
  device::Handle area;
  std::uint32_t count;                                       // of signals of each
  std::uint32_t ranks[(device::kMostRanks + 31) / 32] = {};  // a bit for each that is waited for

  void add(int rank) { ranks[rank / 32] |= 1u << rank % 32; }
};

// The kernels take a Handle, and a WindowWait. Each is for one block of kWindowThreads.
inline constexpr int kWindowThreads = (device::kMostRanks + 31) / 32 * 32;
const void* window_begin_kernel();
const void* window_wait_kernel();

}  // namespace unisono::cuda
