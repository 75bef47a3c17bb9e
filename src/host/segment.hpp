// Memory that other processes of this machine can map. It has no name, so a killed process leaves nothing
// behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/process.hpp"

namespace unisono {

// Throws ResourceError where the machine, or this container, has no room for that much more memory of each of
// so many ranks. It is taken at once, and where there is not enough the kernel would end a process instead of
// refusing.
void check_room(std::size_t bytes, int ranks = 1);

class Segment {
 public:
  // What a peer needs to map a segment. It travels as bytes: `open` trusts nothing in it.
  struct Handle {
    std::int32_t pid = 0, fd = -1;
    std::uint64_t bytes = 0, nonce = 0;
  };

  // Zeroed memory, reserved now: ResourceError when there is not enough.
  static std::shared_ptr<Segment> create(std::size_t bytes);

  // Maps a peer's segment; a segment of this process is the same memory at the same address. Throws
  // ResourceError when the peer is gone, is not this user's, or does not hold `bytes` bytes marked with the
  // handle's nonce.
  static std::shared_ptr<Segment> open(const Handle& handle, std::size_t bytes);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* data() const { return data_ + kPage; }
  std::size_t bytes() const { return bytes_; }
  Handle handle() const;
  void close_file();  // once all who shall map it have: the mappings keep the memory
  const std::uint64_t& nonce() const { return head().nonce; }

  // Says to everyone who has mapped it that its owner needs it no more. False, and nothing said, in a forked
  // child: it is the parent's.
  bool release() {
    if (forks_ != forks()) return false;
    head().released.store(1, std::memory_order_release);
    return true;
  }
  bool released() const { return head().released.load(std::memory_order_acquire) != 0; }

 private:
  struct Head {
    std::uint64_t nonce;  // by which a peer knows the segment
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
