// Far memory: memory of another process that is not mapped here. The kernel copies it (process_vm_readv and
// process_vm_writev, "cross memory attach"), so that any pointer of any rank can be moved without staging.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "host/move.hpp"

namespace unisono::host {

// A far address is an address of rank r's process with r + 1 in the upper 16 bits, which user addresses leave
// free. Other contents of these bits (a tag, or a peer's invention) are cut off. A far address can be offset
// like any pointer, and must never be dereferenced.
inline constexpr std::uint64_t kAddressBits = (std::uint64_t{1} << 48) - 1;
inline byte* far_address(int rank, std::uint64_t at) {
  return reinterpret_cast<byte*>((at & kAddressBits) | static_cast<std::uint64_t>(rank + 1) << 48);
}
inline bool is_far(const byte* at) { return reinterpret_cast<std::uint64_t>(at) >> 48 != 0; }
inline int rank_of(const byte* far) {
  return static_cast<int>(reinterpret_cast<std::uint64_t>(far) >> 48) - 1;
}
inline std::uint64_t address_of(const byte* far) {
  return reinterpret_cast<std::uint64_t>(far) & kAddressBits;
}

enum class Way { read, write };  // of far memory

class Far {
 public:
  // unreachable: throws the error of a failed copy from or to a rank's memory. error: errno.
  Far(std::vector<int> pids, std::function<void(int rank, int error)> unreachable);

  // Does a lane's move if some operands are far. reduce: combines the sources if there are several.
  void move(const Kernels& kernels, Reduce reduce, const Dst* dsts, int n_dsts, const byte* const* srcs,
            int n_srcs, std::size_t bytes);

  static constexpr std::size_t kNearBytes = std::size_t{128} << 10;  // of a copy; a few fit the level-2 cache
  // Returns where this rank reads what lies at `from`: there, or in its copy number `index`, which lasts
  // until the next copy of that number or the next move. Requires: at most kNearBytes bytes; index is below
  // the ranks.
  const byte* near(int index, const byte* from, std::size_t bytes);

  // Copies between `near` and `at` of process `pid`. Returns whether the kernel has copied all.
  static bool try_copy(Way way, int pid, std::uint64_t at, void* near, std::size_t bytes);

 private:
  void copy(Way way, byte* near, const byte* far, std::size_t bytes) const;
  byte* bounce(int index);
  void make_room(std::size_t bounces);
  const byte* fetch(byte* to, const byte* from, std::size_t bytes);
  // Returns the far source that is copied to where the first destination has the result, which is then a sum
  // in place; -1: none.
  static int place_of_result(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                             std::size_t bytes);

  std::vector<int> pids_;
  std::function<void(int, int)> unreachable_;
  std::vector<byte> bounces_;
  std::vector<const byte*> near_srcs_;
  std::vector<Dst> near_dsts_;
};

}  // namespace unisono::host
