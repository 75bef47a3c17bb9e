// Memory that the GPUs of this machine reach: of threads of this process at the same address, of other
// processes mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "host/segment.hpp"

namespace unisono {

class DeviceMemory {
 public:
  // Where it lies, and by what a peer process maps it. On the GPU: vmm, by a file descriptor of CUDA's
  // virtual memory management; ipc, by a cudaIpc handle, where descriptors cannot be had; local, not at all.
  // host: a segment, pinned.
  enum class Kind : std::uint32_t { vmm, ipc, local, host };

  // What a peer needs. It travels as bytes: `open` trusts nothing in it but what the driver checks.
  struct Handle {
    std::int32_t pid = 0, fd = -1;
    std::uint64_t address = 0, bytes = 0;  // where its own process has it
    unsigned char ipc[64] = {};
    Segment::Handle segment;
  };

  // Zeroed memory of `device` (or of the host); `devices` of this process reach it. Throws ResourceError.
  static std::shared_ptr<DeviceMemory> create(std::size_t bytes, int device, const std::vector<int>& devices,
                                              Kind kind);
  // Maps a peer's memory for `device`. Throws ResourceError when the peer is gone or the driver refuses.
  static std::shared_ptr<DeviceMemory> open(const Handle& handle, std::size_t bytes, int device, Kind kind);

  // Waits for all work of the device, and breaks a graph's capture there, where this maps the memory.
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Handle handle() const;

 private:
  DeviceMemory() = default;
  void map(int device, const std::vector<int>& devices);
  void pin();
  class Own;
  static Own& own();
  Kind kind_ = Kind::vmm;
  int device_ = 0, fd_ = -1;
  bool mine_ = true, other_thread_ = false;
  std::uint64_t allocation_ = 0;
  std::shared_ptr<Segment> segment_;
  std::shared_ptr<DeviceMemory> owner_;  // of another thread's
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0, mapped_ = 0;
};

}  // namespace unisono
