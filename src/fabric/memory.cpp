#include "fabric/memory.hpp"

#include <cstdlib>
#include <cstring>

#include "host/segment.hpp"
#include "unisono/error.hpp"

namespace unisono::fabric {

std::string_view take(std::string_view& message, std::size_t bytes, const std::string& who) {
  if (message.size() < bytes)
    throw UsageError("the greeting of " + who +
                     " at the bootstrap is too short: start every rank with the same version of Unisono.");
  const std::string_view front = message.substr(0, bytes);
  message.remove_prefix(bytes);
  return front;
}

void Announcement::write(std::string& message) const {
  append(message, address);
  append(message, bytes);
  for (const std::uint64_t key : keys) append(message, key);
}

Announcement Announcement::read(std::string_view& message, std::size_t channels, std::uint64_t least,
                                const std::string& who) {
  Announcement theirs;
  theirs.address = take<std::uint64_t>(message, who);
  theirs.bytes = take<std::uint64_t>(message, who);
  for (std::size_t c = 0; c < channels; ++c) theirs.keys.push_back(take<std::uint64_t>(message, who));
  if (!theirs.possible(least))
    throw UsageError(who + " announces a region of " + std::to_string(theirs.bytes) +
                     " bytes at an impossible address, or of fewer than the " + std::to_string(least) +
                     " agreed on: start every rank with the same version of Unisono.");
  return theirs;
}

Announcement Region::announcement() const {
  Announcement mine{reinterpret_cast<std::uint64_t>(memory.get()), bytes, {}};
  for (const auto& one : registrations) mine.keys.push_back(one->key);
  return mine;
}

std::shared_ptr<byte> host_memory(std::size_t bytes) {
  check_room(bytes);
  void* const memory = std::aligned_alloc(4096, round_up(bytes ? bytes : 1, 4096));
  if (!memory) throw ResourceError(std::to_string(bytes) + " bytes could not be allocated: use less.");
  std::memset(memory, 0, bytes);  // gives the pages memory now, as some NICs need
  return {static_cast<byte*>(memory), std::free};
}

}  // namespace unisono::fabric
