#include "host/far.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

namespace unisono::host {
namespace {

constexpr std::size_t kAround = 64 << 10;  // bytes; of a piece that goes around a crawling move

// Makes one call of the kernel. Returns how many bytes it has copied, or -1 and errno.
ssize_t copy_once(Way way, int pid, byte* near, std::uint64_t far, std::size_t bytes) {
  const iovec here{near, bytes}, there{reinterpret_cast<void*>(far), bytes};
  return way == Way::read ? ::process_vm_readv(pid, &here, 1, &there, 1, 0)
                          : ::process_vm_writev(pid, &here, 1, &there, 1, 0);
}

// Does the same by memory at the far one's place in a page, which the kernel copies at full speed.
ssize_t copy_around(Way way, int pid, byte* near, std::uint64_t far, std::size_t bytes) {
  thread_local byte room[kAround + 2 * kPage];
  byte* const between = room + (far - reinterpret_cast<std::uintptr_t>(room)) % kPage;
  bytes = std::min(bytes, kAround);
  const Dst out{near}, in{between};
  if (way == Way::write) kernels().copy(&in, 1, near, bytes);
  const ssize_t copied = copy_once(way, pid, between, far, bytes);
  if (way == Way::read && copied > 0) kernels().copy(&out, 1, between, static_cast<std::size_t>(copied));
  return copied;
}

// Copies some bytes, at least one. Returns how many, or at most 0 and errno.
ssize_t copy_some(Way way, int pid, byte* near, std::uint64_t far, std::size_t bytes) {
  const bool crawls = way == Way::read ? string_moves_crawl(near, far)
                                       : string_moves_crawl(reinterpret_cast<void*>(far),
                                                            reinterpret_cast<std::uintptr_t>(near));
  constexpr std::size_t kFew = 1024;  // bytes that are moved as fast as they go around
  return (crawls && bytes > kFew ? copy_around : copy_once)(way, pid, near, far, bytes);
}

}  // namespace

Far::Far(std::vector<int> pids, std::function<void(int, int)> unreachable)
    : pids_(std::move(pids)), unreachable_(std::move(unreachable)) {}

bool Far::try_copy(Way way, int pid, std::uint64_t at, void* near, std::size_t bytes) {
  auto* const here = static_cast<byte*>(near);
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t copied = copy_some(way, pid, here + done, at + done, bytes - done);
    if (copied <= 0) return false;
    done += static_cast<std::size_t>(copied);
  }
  return true;
}

void Far::copy(Way way, byte* near, const byte* far, std::size_t bytes) const {
  const int rank = rank_of(far);
  const int pid = pids_[static_cast<std::size_t>(rank)];
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t copied = copy_some(way, pid, near + done, address_of(far + done), bytes - done);
    if (copied <= 0) {
      if (copied < 0 && errno == EINTR) continue;
      unreachable_(rank, copied < 0 ? errno : EFAULT);
    }
    done += static_cast<std::size_t>(copied);
  }
}

const byte* Far::near(int index, const byte* from, std::size_t bytes) {
  if (!is_far(from)) return from;
  make_room(pids_.size());
  return fetch(bounce(index), from, bytes);
}

const byte* Far::fetch(byte* to, const byte* from, std::size_t bytes) {
  copy(Way::read, to, from, bytes);
  return to;
}

void Far::make_room(std::size_t bounces) {
  const std::size_t bytes = bounces * kNearBytes + kPage;
  if (bounces_.size() < bytes) bounces_.resize(bytes);
}

// At the begin of a page, where a kernel's string moves do not crawl to.
byte* Far::bounce(int index) {
  const std::size_t before = (kPage - reinterpret_cast<std::uintptr_t>(bounces_.data()) % kPage) % kPage;
  return bounces_.data() + before + static_cast<std::size_t>(index) * kNearBytes;
}

void Far::move(const Kernels& kernels, Reduce reduce, const Dst* dsts, int n_dsts, const byte* const* srcs,
               int n_srcs, std::size_t bytes) {
  // one source and one destination need no bounce: the kernel copies straight through
  if (n_srcs == 1 && n_dsts == 1) {
    if (!is_far(srcs[0])) return copy(Way::write, const_cast<byte*>(srcs[0]), dsts[0].at, bytes);
    if (!is_far(dsts[0].at)) return copy(Way::read, dsts[0].at, srcs[0], bytes);
  }
  make_room(static_cast<std::size_t>(n_srcs) + 1);
  near_srcs_.resize(static_cast<std::size_t>(n_srcs));
  const int shared = n_srcs > 1 ? place_of_result(dsts, n_dsts, srcs, n_srcs, bytes) : -1;
  for (std::size_t at = 0; at < bytes; at += kNearBytes) {
    const std::size_t length = std::min(kNearBytes, bytes - at);
    near_dsts_.clear();
    for (int d = 0; d < n_dsts; ++d)
      if (!is_far(dsts[d].at)) near_dsts_.push_back({dsts[d].at + at, dsts[d].stream});
    const bool bounces = n_srcs > 1 && near_dsts_.size() < static_cast<std::size_t>(n_dsts);
    if (bounces) near_dsts_.insert(near_dsts_.begin(), {bounce(shared < 0 ? n_srcs : shared)});
    for (int s = 0; s < n_srcs; ++s) {
      const byte* from = srcs[s] + at;
      byte* const to = s == shared ? near_dsts_[0].at : bounce(s);
      near_srcs_[static_cast<std::size_t>(s)] = is_far(from) ? fetch(to, from, length) : from;
    }
    // far destinations are written from a near copy of the result
    const byte* result = n_srcs == 1 ? near_srcs_[0] : near_dsts_[0].at;
    const int n_near = static_cast<int>(near_dsts_.size());
    if (n_srcs == 1) kernels.copy(near_dsts_.data(), n_near, near_srcs_[0], length);
    else reduce(near_dsts_.data(), n_near, near_srcs_.data(), n_srcs, length);
    for (int d = 0; d < n_dsts; ++d)
      if (is_far(dsts[d].at)) copy(Way::write, const_cast<byte*>(result), dsts[d].at + at, length);
  }
}

// A sum of two arrays in place takes two thirds of the cache, and of the time, of one into a third array.
int Far::place_of_result(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                         std::size_t bytes) {
  const bool bounces = std::any_of(dsts, dsts + n_dsts, [](const Dst& dst) { return is_far(dst.at); });
  const byte* const to = dsts[0].at;
  const auto meets = [&](const byte* from) {
    return !is_far(from) && from < to + bytes && to < from + bytes;
  };
  if (!bounces && (dsts[0].stream || std::any_of(srcs, srcs + n_srcs, meets))) return -1;
  const auto* const far = std::find_if(srcs, srcs + n_srcs, is_far);
  return far == srcs + n_srcs ? -1 : static_cast<int>(far - srcs);
}

}  // namespace unisono::host
