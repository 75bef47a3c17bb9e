// Memory that other processes of this machine can map, without a name: a killed process leaves nothing
// behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/process.hpp"

namespace unisono {

// Throws ResourceError if the machine or this container has no room for `bytes` bytes more of each of `ranks`
// ranks. The memory is taken at once: if there is too little, the kernel ends a process instead of refusing.
void check_room(std::size_t bytes, int ranks = 1);

class Segment {
 public:
  // A peer's means to map a segment. Handles travel as bytes: `open` trusts nothing in them.
  struct Handle {
    std::int32_t pid = 0, fd = -1;
    std::uint64_t bytes = 0, nonce = 0;
  };

  // Returns zeroed memory. Reserves the first `now` bytes; `fill` takes the others. Throws ResourceError if
  // there is not enough for all of them.
  static std::shared_ptr<Segment> create(std::size_t bytes, std::size_t now);
  static std::shared_ptr<Segment> create(std::size_t bytes) { return create(bytes, bytes); }

  // Maps a peer's segment; a segment of this process is the same memory at the same address. Throws
  // ResourceError if the peer is gone, is not this user's, or does not hold `bytes` bytes marked with the
  // handle's nonce.
  static std::shared_ptr<Segment> open(const Handle& handle, std::size_t bytes, std::size_t now);
  static std::shared_ptr<Segment> open(const Handle& handle, std::size_t bytes) {
    return open(handle, bytes, bytes);
  }

  // Takes memory for a part, if it has none yet, and maps it here, so that no access has to. Leaves what is
  // written there. Throws ResourceError if there is not enough. From any thread or process that has mapped
  // the segment.
  void fill(const std::byte* part, std::size_t bytes);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* data() const { return data_ + kPage; }
  std::size_t bytes() const { return bytes_; }
  Handle handle() const;
  void close_file();  // Requires: all peers have mapped the segment. The mappings keep the memory.
  const std::uint64_t& nonce() const { return head().nonce; }

  // Tells everyone who has mapped the segment that its owner needs it no more. In a forked child returns
  // false and tells nothing: the segment is the parent's.
  bool release() {
    if (forks_ != forks()) return false;
    head().released.store(1, std::memory_order_release);
    return true;
  }
  bool released() const { return head().released.load(std::memory_order_acquire) != 0; }

 private:
  struct Head {
    std::uint64_t nonce;  // identifies the segment to peers
    std::atomic<std::uint32_t> released;
  };
  static constexpr std::size_t kPage = 4096;  // the head has the first one
  Head& head() const { return *reinterpret_cast<Head*>(data_); }
  Segment() = default;
  int fd_ = -1;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool owner_ = false;
  unsigned forks_ = forks();
};

}  // namespace unisono
