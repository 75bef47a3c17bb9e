// Memory that the GPUs of this machine reach. Threads of this process have it at the same address; other
// processes map it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "host/segment.hpp"

namespace unisono {

class DeviceMemory {
 public:
  // The memory's place, and how a peer process maps it. On the GPU: vmm, by a file descriptor of CUDA's
  // virtual memory management; ipc, by a cudaIpc handle, if there are no descriptors; local, not at all.
  // host: a pinned segment. lent: the user's, by a cudaIpc handle of the allocation that it lies in.
  enum class Kind : std::uint32_t { vmm, ipc, local, host, lent };

  // The description from which a peer maps the memory. It travels as bytes: `open` trusts only fields that
  // the driver checks.
  struct Handle {
    std::int32_t pid = 0, fd = -1;
    std::uint64_t address = 0, bytes = 0;  // in the process that made it
    unsigned char ipc[64] = {};
    std::uint64_t offset = 0;  // of lent memory, into what the cudaIpc handle maps
    Segment::Handle segment;
  };

  // Returns zeroed memory of `device` (or of the host), which `devices` of this process reach.
  // Throws ResourceError if there is no memory, or the driver refuses.
  static std::shared_ptr<DeviceMemory> create(std::size_t bytes, int device, const std::vector<int>& devices,
                                              Kind kind);
  // Returns memory of the user's, which `devices` of this process reach from now on too. owner: kept as long
  // as any rank of this process has the result.
  // Throws UsageError if it is not memory of `device`, and ResourceError if CUDA does not share it with other
  // processes.
  static std::shared_ptr<DeviceMemory> lend(std::byte* at, std::size_t bytes, int device,
                                            const std::vector<int>& devices,
                                            std::shared_ptr<const void> owner);
  // Maps a peer's memory for `device`. Throws ResourceError if the peer is gone or the driver refuses.
  static std::shared_ptr<DeviceMemory> open(const Handle& handle, std::size_t bytes, int device, Kind kind);

  // If this object maps the memory, waits for all work of the device, and breaks a graph's capture there.
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  bool lent() const { return kind_ == Kind::lent; }
  Handle handle() const;

 private:
  DeviceMemory() = default;
  void map(int device, const std::vector<int>& devices);
  void pin();
  void map_lent(const Handle& handle);
  class Own;
  static Own& own();
  Kind kind_ = Kind::vmm;
  int device_ = 0, fd_ = -1;
  bool mine_ = true, other_thread_ = false;
  std::uint64_t allocation_ = 0;
  std::shared_ptr<Segment> segment_;
  std::shared_ptr<const void> owner_;  // another thread's DeviceMemory, or what keeps the user's memory
  std::byte* data_ = nullptr;
  std::byte* allocation_begin_ = nullptr;  // of lent memory: where the cudaIpc handle's allocation begins
  std::size_t bytes_ = 0, mapped_ = 0;
};

}  // namespace unisono
