#include "fabric/port.hpp"

#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>

#include "fabric/channel.hpp"
#include "fabric/library.hpp"

namespace unisono::fabric {
namespace {

constexpr const char* kOverrun =
    "its completion queue has overrun: give it more entries (UNISONO_FABRIC_COMPLETIONS)";

}  // namespace

Port::Port(Info nic, int channels, Failed failed, Calls& calls, std::size_t completions)
    : nic_(std::move(nic)), failed_(std::move(failed)), calls_(calls) {
  auto* const info = const_cast<fi_info*>(nic_.get());
  fid_fabric* fabric = nullptr;
  checked(library().fabric(info->fabric_attr, &fabric, nullptr), "opening the fabric");
  fabric_ = Owned(fabric);
  fid_domain* domain = nullptr;
  checked(fi_domain(fabric, info, &domain, nullptr), "opening the NIC");
  domain_ = Owned(domain);
  const std::size_t in_flight = 2 * std::max<std::size_t>(info->tx_attr->size, 1024);
  fi_cq_attr queue{};
  queue.format = FI_CQ_FORMAT_DATA;
  queue.wait_obj = FI_WAIT_NONE;
  queue.size = completions ? completions : in_flight * static_cast<std::size_t>(channels);
  fid_cq* cq = nullptr;
  checked(fi_cq_open(domain, &queue, &cq, nullptr), "making the completion queue");
  completions_ = Owned(cq);
}

bool Port::progress(const Arrived& arrived) {
  const Calls::Inside inside(calls_);
  std::array<fi_cq_data_entry, 32> entries;
  bool any = false;
  for (;;) {
    const auto count = fi_cq_read(completions_.get(), entries.data(), entries.size());
    if (count == -FI_EAGAIN || count == 0) return any;
    any = true;
    if (count == -FI_EAVAIL) {
      read_error();
      continue;
    }
    if (count < 0) {
      failed_(kQueue, count == -FI_EOVERRUN ? kOverrun : error_text(count));
      return any;
    }
    for (long i = 0; i < count; ++i) {
      const fi_cq_data_entry& entry = entries[static_cast<std::size_t>(i)];
      // provider sockets sets the flag for the writer's own completion too
      if ((entry.flags & FI_REMOTE_CQ_DATA) != 0 && (entry.flags & FI_WRITE) == 0)
        arrived(static_cast<std::uint32_t>(entry.data));
      else if (auto* const operation = static_cast<Operation*>(entry.op_context))
        operation->channel->complete(operation);
    }
    if (static_cast<std::size_t>(count) < entries.size()) return any;
  }
}

void Port::read_error() {
  fi_cq_err_entry entry{};
  if (fi_cq_readerr(completions_.get(), &entry, 0) < 0) return;
  const auto* operation = static_cast<const Operation*>(entry.op_context);
  if (!operation && entry.err == FI_EOVERRUN) return failed_(kQueue, kOverrun);
  const char* detail = fi_cq_strerror(completions_.get(), entry.prov_errno, entry.err_data, nullptr, 0);
  failed_(operation ? operation->peer : kSomePeer,
          detail && *detail ? error_text(entry.err) + " (" + detail + ")" : error_text(entry.err));
}

}  // namespace unisono::fabric
