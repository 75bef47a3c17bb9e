#include "host/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/bytes.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

// The segments that this process has created. Ranks that are threads of it share one mapping.
struct Own {
  std::mutex mutex;
  std::map<std::uint64_t, std::weak_ptr<Segment>> by_nonce;
};
Own& own() {
  static Own& segments = *new Own;  // never destroyed: a communicator may be a global of the program
  return segments;
}

// Returns `result`. Throws ResourceError with errno's text if `result` is negative.
int check(int result, const std::string& what) {
  if (result >= 0) return result;
  throw ResourceError(what + " failed: " + std::strerror(errno) + ".");
}

// std::random_device asks the processor what it is, which takes 60 us on a virtual machine.
std::uint64_t fresh_nonce() {
  std::uint64_t nonce = 0;
  check(::getentropy(&nonce, sizeof nonce), "drawing a random number");
  return nonce | 1;
}

// Reserves a file's memory. Returns 0 or an errno. Works in pieces: if a signal comes, the kernel takes the
// current piece back, and it is reserved again.
int reserve(int fd, std::size_t bytes) {
  constexpr std::size_t kPiece = std::size_t{64} << 20;
  int error = 0;
  for (std::size_t done = 0; done < bytes && (error == 0 || error == EINTR);) {
    const std::size_t length = std::min(kPiece, bytes - done);
    error = ::posix_fallocate(fd, static_cast<off_t>(done), static_cast<off_t>(length));
    if (error == 0) done += length;
  }
  return error;
}

std::string amount(std::size_t bytes) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  return bytes < kMiB ? std::to_string(bytes >> 10) + " KiB" : std::to_string(bytes / kMiB) + " MiB";
}

constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

// Returns the number in `file` (after `name`, or at its begin) times `unit`; kNone if there is none.
std::size_t number_in(const std::string& file, const std::string& name, std::size_t unit) {
  std::ifstream in(file);
  for (std::string word; in >> word;) {
    if (!name.empty() && word != name) continue;
    if (!name.empty()) in >> word;
    if (word.empty() || word.find_first_not_of("0123456789") != std::string::npos || word.size() > 18) break;
    return std::stoull(word) * unit;
  }
  return kNone;
}

// Returns the bytes that a control group's limit leaves. Inactive cached files count as room.
std::size_t room_in(const std::string& group, const char* limit, const char* usage, const char* idle) {
  const std::size_t most = number_in(group + limit, "", 1);
  if (most == kNone) return kNone;
  const std::size_t used = number_in(group + usage, "", 1),
                    cached = number_in(group + "memory.stat", idle, 1);
  if (std::max(used, cached) == kNone) return most;
  return most - std::min(most, used - std::min(used, cached));
}

// lazy: memory comes in parts, which a huge page would exceed.
std::byte* map(int fd, std::size_t bytes, bool lazy) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) check(-1, "mapping " + amount(bytes) + " of shared memory");
  if (!lazy) ::madvise(at, bytes, MADV_HUGEPAGE);  // a hint: refused if shared memory has no huge pages
  return static_cast<std::byte*>(at);
}

[[noreturn]] void refuse(std::size_t bytes, int error) {
  throw ResourceError("there is no room for " + amount(bytes) + " of shared memory (" + std::strerror(error) +
                      "): free memory, raise the container's limit, or use fewer ranks.");
}

}  // namespace

void check_room(std::size_t bytes, int ranks) {
  const std::size_t room =
      std::min({number_in("/proc/meminfo", "MemAvailable:", 1024),
                room_in("/sys/fs/cgroup/", "memory.max", "memory.current", "inactive_file"),
                room_in("/sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes",
                        "total_inactive_file")});
  const auto each = room / static_cast<std::size_t>(ranks);
  if (bytes > each)
    throw ResourceError("there is no room for " + amount(bytes) + " of memory" +
                        (ranks > 1 ? " for each of " + std::to_string(ranks) + " ranks" : "") +
                        ", only for " + amount(each) +
                        ": free memory, raise the container's limit, or use fewer ranks.");
}

std::shared_ptr<Segment> Segment::create(std::size_t bytes, std::size_t now) {
  check_room(bytes);
  std::shared_ptr<Segment> segment(new Segment);
  segment->owner_ = true;
  segment->bytes_ = bytes;
  const std::size_t whole = bytes + kPage;
  segment->fd_ = check(::memfd_create("unisono", MFD_CLOEXEC), "creating shared memory");
  check(::ftruncate(segment->fd_, static_cast<off_t>(whole)), "sizing shared memory");
  if (const int error = reserve(segment->fd_, now + kPage)) refuse(now + kPage, error);
  segment->data_ = map(segment->fd_, whole, now < bytes);
  const std::uint64_t nonce = segment->head().nonce = fresh_nonce();
  std::scoped_lock lock(own().mutex);
  own().by_nonce[nonce] = segment;
  return segment;
}

std::shared_ptr<Segment> Segment::open(const Handle& handle, std::size_t bytes, std::size_t now) {
  const std::string peer = "the shared memory of process " + std::to_string(handle.pid);
  if (handle.bytes != bytes)
    throw ResourceError(
        peer + " has " + std::to_string(handle.bytes) + " bytes, not the " + std::to_string(bytes) +
        " of this rank: start every rank with the same version and the same UNISONO_ variables.");
  if (handle.pid == ::getpid()) {
    std::scoped_lock lock(own().mutex);
    const auto found = own().by_nonce.find(handle.nonce);
    auto segment = found == own().by_nonce.end() ? nullptr : found->second.lock();
    if (!segment || segment->bytes_ != bytes)
      throw ResourceError(peer + " is not one that this process has made.");
    return segment;
  }
  std::shared_ptr<Segment> segment(new Segment);
  segment->bytes_ = bytes;
  const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  segment->fd_ = check(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK),
                       "opening " + peer + " (ranks of one machine run in one PID namespace, as one user)");
  struct stat found{};
  check(::fstat(segment->fd_, &found), "reading the size of " + peer);
  if (!S_ISREG(found.st_mode) || static_cast<std::size_t>(found.st_size) != bytes + kPage)
    throw ResourceError(peer + " is not what the rank announced.");
  segment->data_ = map(segment->fd_, bytes + kPage, now < bytes);
  segment->close_file();
  if (segment->head().nonce != handle.nonce)
    throw ResourceError(peer + " does not carry the mark that the rank announced.");
  return segment;
}

void Segment::fill(const std::byte* part, std::size_t bytes) {
  constexpr std::size_t kLook = std::size_t{256} << 10;  // less is taken sooner than room is looked for
  if (bytes >= kLook) check_room(bytes);
  const std::size_t first = static_cast<std::size_t>(part - data_) / kPage * kPage;
  const std::size_t length = round_up(static_cast<std::size_t>(part - data_) + bytes, kPage) - first;
  while (::madvise(data_ + first, length, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) refuse(bytes, errno);
    // Linux has it from 5.14 on. An addition of nothing leaves what a peer writes meanwhile.
    for (std::size_t at = first; at < first + length; at += kPage)
      std::atomic_ref(*reinterpret_cast<std::uint32_t*>(data_ + at)).fetch_add(0);
    return;
  }
}

void Segment::close_file() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Segment::Handle Segment::handle() const { return {::getpid(), fd_, bytes_, head().nonce}; }

Segment::~Segment() {
  if (owner_ && data_) {
    std::scoped_lock lock(own().mutex);
    own().by_nonce.erase(head().nonce);
  }
  if (data_) ::munmap(data_, bytes_ + kPage);
  close_file();
}

}  // namespace unisono
