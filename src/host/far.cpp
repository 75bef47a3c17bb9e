#include "host/far.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

namespace unisono::host {
namespace {

constexpr std::size_t kBounce = 128 << 10;  // bytes of a far source at once; a few fit the level-2 cache

}  // namespace

Far::Far(std::vector<int> pids, std::function<void(int, int)> unreachable)
    : pids_(std::move(pids)), unreachable_(std::move(unreachable)) {}

bool Far::read(int pid, std::uint64_t at, void* to, std::size_t bytes) {
  const iovec here{to, bytes}, there{reinterpret_cast<void*>(at), bytes};
  return ::process_vm_readv(pid, &here, 1, &there, 1, 0) == static_cast<ssize_t>(bytes);
}

void Far::copy(Way way, byte* near, const byte* far, std::size_t bytes) {
  const int rank = rank_of(far);
  const int pid = pids_[static_cast<std::size_t>(rank)];
  for (std::size_t done = 0; done < bytes;) {
    const iovec here{near + done, bytes - done},
        there{reinterpret_cast<void*>(address_of(far + done)), bytes - done};
    const ssize_t copied = way == Way::read ? ::process_vm_readv(pid, &here, 1, &there, 1, 0)
                                            : ::process_vm_writev(pid, &here, 1, &there, 1, 0);
    if (copied <= 0) {
      if (copied < 0 && errno == EINTR) continue;
      unreachable_(rank, copied < 0 ? errno : EFAULT);
    }
    done += static_cast<std::size_t>(copied);
  }
}

byte* Far::bounce(int index) { return bounces_.data() + static_cast<std::size_t>(index) * kBounce; }

void Far::move(const Kernels& kernels, Reduce reduce, const Dst* dsts, int n_dsts, const byte* const* srcs,
               int n_srcs, std::size_t bytes) {
  // one source and one destination need no bounce: the kernel copies straight through
  if (n_srcs == 1 && n_dsts == 1) {
    if (!is_far(srcs[0])) return copy(Way::write, const_cast<byte*>(srcs[0]), dsts[0].at, bytes);
    if (!is_far(dsts[0].at)) return copy(Way::read, dsts[0].at, srcs[0], bytes);
  }
  bounces_.resize(static_cast<std::size_t>(n_srcs + 1) * kBounce);
  near_srcs_.resize(static_cast<std::size_t>(n_srcs));
  near_dsts_.clear();
  for (std::size_t at = 0; at < bytes; at += kBounce) {
    const std::size_t length = std::min(kBounce, bytes - at);
    for (int s = 0; s < n_srcs; ++s) {
      const byte* from = srcs[s] + at;
      if (is_far(from)) copy(Way::read, bounce(s), from, length);
      near_srcs_[static_cast<std::size_t>(s)] = is_far(from) ? bounce(s) : from;
    }
    near_dsts_.clear();
    for (int d = 0; d < n_dsts; ++d)
      if (!is_far(dsts[d].at)) near_dsts_.push_back({dsts[d].at + at, dsts[d].stream});
    // far destinations are written from a near copy of the result
    const byte* result = n_srcs == 1 ? near_srcs_[0] : nullptr;
    if (!result) {
      if (near_dsts_.size() < static_cast<std::size_t>(n_dsts))
        near_dsts_.insert(near_dsts_.begin(), {bounce(n_srcs)});
      result = near_dsts_[0].at;
    }
    const int n_near = static_cast<int>(near_dsts_.size());
    if (n_srcs == 1) kernels.copy(near_dsts_.data(), n_near, near_srcs_[0], length);
    else reduce(near_dsts_.data(), n_near, near_srcs_.data(), n_srcs, length);
    for (int d = 0; d < n_dsts; ++d)
      if (is_far(dsts[d].at)) copy(Way::write, const_cast<byte*>(result), dsts[d].at + at, length);
  }
}

}  // namespace unisono::host
