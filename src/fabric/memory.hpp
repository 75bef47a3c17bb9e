// Memory that a NIC writes to or reads from, and what peers must know of it.
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

// What a rank tells others of a region: it is checked, since it decides where they write.
struct Announcement {
  std::uint64_t address = 0;  // in its process; peers name places by it, or by the offset
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> keys;  // by channel

  // Appends it to a message; reads one of `channels` keys from the front, which is taken off. UsageError when
  // the message is too short, or the region not `possible`.
  void write(std::string& message) const;
  static Announcement read(std::string_view& message, std::size_t channels, std::uint64_t least,
                           const std::string& who);

  // Whether there can be such a region of `least` bytes or more.
  bool possible(std::uint64_t least) const {
    return bytes >= least && address >> 48 == 0 && bytes >> 47 == 0;
  }

  // Whether `bytes_there` at `offset` lie within it.
  bool holds(std::uint64_t offset, std::uint64_t bytes_there) const {
    return offset <= bytes && bytes_there <= bytes - offset;
  }
};

// Zeroed pages of the host, freed with their last owner. ResourceError where they cannot be had.
std::shared_ptr<byte> host_memory(std::size_t bytes);

// A piece of memory and its registrations by channel; those of one NIC share theirs, where it allows that.
struct Region {
  std::shared_ptr<byte> memory;
  std::size_t bytes = 0;
  std::optional<int> device{};  // of GPU memory
  std::vector<std::shared_ptr<const Registration>> registrations;
  // Set, by any thread, when the caller needs it no more.
  std::shared_ptr<std::atomic<bool>> released = std::make_shared<std::atomic<bool>>(false);

  bool holds(const byte* at, std::size_t bytes_there) const {
    return at >= memory.get() && at <= memory.get() + bytes &&
           bytes_there <= bytes - static_cast<std::size_t>(at - memory.get());
  }
  Announcement announcement() const;
};

// Fixed-size values of messages.
template <class T>
void append(std::string& message, const T& value) {
  message.append(reinterpret_cast<const char*>(&value), sizeof value);
}
// The front of the message, which is shortened by it; UsageError, naming who sent it, when there is less.
std::string_view take(std::string_view& message, std::size_t bytes, const std::string& who);
template <class T>
T take(std::string_view& message, const std::string& who) {
  T value;
  const std::string_view front = take(message, sizeof value, who);
  std::copy(front.begin(), front.end(), reinterpret_cast<char*>(&value));
  return value;
}

}  // namespace unisono::fabric
