#include "fabric/channel.hpp"

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>

#include "fabric/library.hpp"
#include "fabric/shm_file.hpp"
#include "unisono/error.hpp"

namespace unisono::fabric {

Channel::Channel(const Info& nic, Failed failed, Calls& calls, std::size_t completions)
    : nic_(with_own_file(nic)), failed_(std::move(failed)), calls_(calls) {
  auto* const info = const_cast<fi_info*>(nic_.get());
  fid_fabric* fabric = nullptr;
  checked(library().fabric(info->fabric_attr, &fabric, nullptr), "opening the fabric");
  fabric_ = Owned(fabric);
  fid_domain* domain = nullptr;
  checked(fi_domain(fabric, info, &domain, nullptr), "opening the NIC");
  domain_ = Owned(domain);
  fi_av_attr table{};
  table.type = FI_AV_TABLE;
  fid_av* addresses = nullptr;
  checked(fi_av_open(domain, &table, &addresses, nullptr), "making the table of addresses");
  addresses_ = Owned(addresses);
  fi_cq_attr queue{};
  queue.format = FI_CQ_FORMAT_DATA;
  queue.wait_obj = FI_WAIT_NONE;
  queue.size = completions ? completions : 2 * std::max<std::size_t>(info->tx_attr->size, 1024);
  fid_cq* cq = nullptr;
  checked(fi_cq_open(domain, &queue, &cq, nullptr), "making the completion queue");
  completions_ = Owned(cq);
  fid_ep* endpoint = nullptr;
  checked(fi_endpoint(domain, info, &endpoint, nullptr), "making the endpoint");
  endpoint_ = Owned(endpoint);
  checked(fi_ep_bind(endpoint, &addresses->fid, 0), "binding the endpoint");
  checked(fi_ep_bind(endpoint, &cq->fid, FI_TRANSMIT | FI_RECV), "binding the endpoint");
  checked(fi_enable(endpoint), "enabling the endpoint");
}

Channel::~Channel() = default;

std::string Channel::address() const {
  std::string bytes(256, '\0');
  std::size_t size = bytes.size();
  checked(fi_getname(&endpoint_->fid, bytes.data(), &size), "reading the endpoint's address");
  bytes.resize(size);
  return bytes;
}

void Channel::connect(const std::vector<std::string>& addresses) {
  known_ = addresses;
  peers_.assign(addresses.size(), FI_ADDR_UNSPEC);
  blocked_.resize(addresses.size());
  for (std::size_t r = 0; r < addresses.size(); ++r)
    if (checked(fi_av_insert(addresses_.get(), addresses[r].data(), 1, &peers_[r], 0, nullptr),
                "taking an address") != 1)
      throw ResourceError("the provider refuses the address of rank " + std::to_string(r) +
                          ": see that all ranks name the same provider and reach each other's network.");
}

void Channel::bury(int peer) const noexcept {
  if (const auto at = static_cast<std::size_t>(peer); at < known_.size()) remove_file(known_[at]);
}

namespace {

std::string refusal(std::size_t bytes, bool on_gpu, const std::string& provider, const std::string& why) {
  return "registering " + std::to_string(bytes) + " bytes of " + (on_gpu ? "GPU" : "host") +
         " memory with provider " + provider + " was refused (" + why + "): " +
         (on_gpu ? "use a libfabric that was built with CUDA and a driver of the NIC that takes DMABUFs, or "
                   "load nvidia-peermem; or use host memory."
                 : "raise the limit of locked memory (ulimit -l, in containers --ulimit memlock=-1), or use "
                   "less.");
}

}  // namespace

Registration Channel::enroll(byte* at, std::size_t bytes, std::optional<int> device,
                             [[maybe_unused]] const cuda::Dmabuf& dmabuf) {
  Registration made;
  iovec extent{at, bytes};
  fi_mr_attr attributes{};
  attributes.mr_iov = &extent;
  attributes.iov_count = 1;
  attributes.access = FI_WRITE | FI_REMOTE_WRITE;
  attributes.requested_key = next_key_++;
  attributes.iface = device ? FI_HMEM_CUDA : FI_HMEM_SYSTEM;
  attributes.device.cuda = device.value_or(0);
  fid_mr* mr = nullptr;
#ifdef FI_MR_DMABUF  // libfabric 1.20; one older than the headers is not opened
  if (dmabuf.descriptor >= 0) {
    const fi_mr_dmabuf range{dmabuf.descriptor, static_cast<std::uint64_t>(at - dmabuf.begin), bytes,
                             dmabuf.begin};
    fi_mr_attr by_descriptor = attributes;
    by_descriptor.dmabuf = &range;
    if (fi_mr_regattr(domain_.get(), &by_descriptor, FI_MR_DMABUF, &mr) < 0) mr = nullptr;
  }
#endif
  if (!mr)
    if (const int code = fi_mr_regattr(domain_.get(), &attributes, 0, &mr); code < 0)
      throw ResourceError(refusal(bytes, device.has_value(), nic_->fabric_attr->prov_name, error_text(code)));
  made.mr = Owned(mr);
  if ((nic_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
    checked(fi_mr_bind(mr, &endpoint_->fid, 0), "binding a region");
    checked(fi_mr_enable(mr), "enabling a region");
  }
  made.key = fi_mr_key(mr);
  return made;
}

Channel::Operation* Channel::take_operation() {
  if (idle_.empty()) return &operations_.emplace_back();
  Operation* const operation = idle_.back();
  idle_.pop_back();
  return operation;
}

bool Channel::post(const Write& one, Batch& batch) {
  const Calls::Inside inside(calls_);
  Operation* const operation = take_operation();
  operation->batch = &batch;
  operation->peer = one.peer;
  const auto code = fi_writedata(endpoint_.get(), one.from, one.bytes, one.descriptor, one.immediate,
                                 peers_[static_cast<std::size_t>(one.peer)], one.to, one.key, operation);
  if (code != 0) idle_.push_back(operation);
  if (code == -FI_EAGAIN) return false;
  if (code != 0) failed_(one.peer, error_text(code));
  batch.add();
  return true;
}

bool Channel::try_inject(const Write& one) {
  const Calls::Inside inside(calls_);
  const auto code = fi_inject_writedata(endpoint_.get(), one.from, one.bytes, one.immediate,
                                        peers_[static_cast<std::size_t>(one.peer)], one.to, one.key);
  if (code == -FI_EAGAIN) return false;
  if (code != 0) failed_(one.peer, error_text(code));
  return true;
}

bool Channel::progress(const Arrived& arrived) {
  const Calls::Inside inside(calls_);
  std::array<fi_cq_data_entry, 32> entries;
  bool any = false;
  for (;;) {
    const auto count = fi_cq_read(completions_.get(), entries.data(), entries.size());
    if (count == -FI_EAGAIN || count == 0) break;
    any = true;
    if (count == -FI_EAVAIL) {
      read_error();
      continue;
    }
    if (count < 0) {
      failed_(kQueue,
              count == -FI_EOVERRUN
                  ? "its completion queue has overrun: give it more entries (UNISONO_FABRIC_COMPLETIONS)"
                  : error_text(count));
      break;
    }
    for (long i = 0; i < count; ++i) {
      const fi_cq_data_entry& entry = entries[static_cast<std::size_t>(i)];
      // sockets sets the flag for the writer's own completion too
      if ((entry.flags & FI_REMOTE_CQ_DATA) != 0 && (entry.flags & FI_WRITE) == 0)
        arrived(static_cast<std::uint32_t>(entry.data));
      else if (entry.op_context) complete(static_cast<Operation*>(entry.op_context));
    }
    if (static_cast<std::size_t>(count) < entries.size()) break;
  }
  for (auto& queue : blocked_)
    while (!queue.empty() && post(queue.front().what->write, queue.front().what->batch)) {
      const auto writer = queue.front().writer;
      queue.pop_front();
      any = true;
      writer.resume();
    }
  return any;
}

void Channel::complete(Operation* operation) {
  Batch* const batch = operation->batch;
  idle_.push_back(operation);
  batch->complete();
}

void Channel::read_error() {
  fi_cq_err_entry entry{};
  if (fi_cq_readerr(completions_.get(), &entry, 0) < 0) return;
  const auto* operation = static_cast<const Operation*>(entry.op_context);
  const char* detail = fi_cq_strerror(completions_.get(), entry.prov_errno, entry.err_data, nullptr, 0);
  failed_(operation                  ? operation->peer
          : entry.err == FI_EOVERRUN ? kQueue
                                     : kSomePeer,
          entry.err == FI_EOVERRUN
              ? "its completion queue has overrun: give it more entries (UNISONO_FABRIC_COMPLETIONS)"
          : detail && *detail ? error_text(entry.err) + " (" + detail + ")"
                              : error_text(entry.err));
}

}  // namespace unisono::fabric
