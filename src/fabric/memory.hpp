// Memory that a NIC writes to or reads from, and its announcement to peers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fabric/channel.hpp"

namespace unisono::fabric {

// A rank's announcement of a region to its peers. They check it, since it decides where they write.
struct Announcement {
  std::uint64_t address = 0;  // in its process; peers name places by it, or by the offset
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> keys;  // by channel

  // `write` appends the announcement to a message. `read` takes one of `channels` keys off the front. Throws
  // UsageError if the message is too short, or the region not `possible`.
  void write(std::string& message) const;
  static Announcement read(std::string_view& message, std::size_t channels, std::uint64_t least,
                           const std::string& who);

  // Returns whether there can be such a region of `least` bytes or more.
  bool possible(std::uint64_t least) const {
    return bytes >= least && address >> 48 == 0 && bytes >> 47 == 0;
  }

  // Returns whether `bytes_there` bytes at `offset` lie within the region.
  bool holds(std::uint64_t offset, std::uint64_t bytes_there) const {
    return offset <= bytes && bytes_there <= bytes - offset;
  }
};

// Returns zeroed pages of the host, freed with their last owner. Throws ResourceError if there is no room.
std::shared_ptr<byte> host_memory(std::size_t bytes);

// Memory and its registrations by channel. Channels of one NIC share one registration if the NIC allows that.
struct Region {
  std::shared_ptr<byte> memory;
  std::size_t bytes = 0;
  std::optional<int> device{};  // of GPU memory
  std::vector<std::shared_ptr<const Registration>> registrations;
  // Set by any thread when the caller needs the memory no more.
  std::shared_ptr<std::atomic<bool>> released = std::make_shared<std::atomic<bool>>(false);

  bool holds(const byte* at, std::size_t bytes_there) const {
    return at >= memory.get() && at <= memory.get() + bytes &&
           bytes_there <= bytes - static_cast<std::size_t>(at - memory.get());
  }
  // Returns what writes from it need; null if the provider wants nothing.
  void* descriptor(int channel) const {
    return registrations.empty() ? nullptr : registrations[static_cast<std::size_t>(channel)]->descriptor();
  }
  Announcement announcement() const;
};

// Appends a value of fixed size to a message.
template <class T>
void append(std::string& message, const T& value) {
  message.append(reinterpret_cast<const char*>(&value), sizeof value);
}
// Takes `bytes` bytes off the front of a message. Throws UsageError, which names the sender, if it has fewer.
std::string_view take(std::string_view& message, std::size_t bytes, const std::string& who);
template <class T>
T take(std::string_view& message, const std::string& who) {
  T value;
  const std::string_view front = take(message, sizeof value, who);
  std::copy(front.begin(), front.end(), reinterpret_cast<char*>(&value));
  return value;
}

}  // namespace unisono::fabric
