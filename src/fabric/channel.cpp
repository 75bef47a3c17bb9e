#include "fabric/channel.hpp"

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "fabric/library.hpp"
#include "unisono/error.hpp"

namespace unisono::fabric {

Channel::Channel(Port& port) : port_(port) {
  constexpr int kTries = 100;  // each process that starts may take one file away
  for (int tries = 0; tries < kTries; ++tries) {
    open();
    if (file_.take(address())) return;
  }
  throw ResourceError("the file of an endpoint of provider shm cannot be locked in /dev/shm (" +
                      std::string(std::strerror(errno)) +
                      "): raise the limit of open files (ulimit -n), or use another provider (tcp).");
}

void Channel::open() {
  endpoint_ = {};
  nic_ = with_own_file(port_.nic());
  fi_av_attr table{};
  table.type = FI_AV_TABLE;
  fid_av* addresses = nullptr;
  checked(fi_av_open(port_.domain(), &table, &addresses, nullptr), "making the table of addresses");
  addresses_ = Owned(addresses);
  fid_ep* endpoint = nullptr;
  checked(fi_endpoint(port_.domain(), const_cast<fi_info*>(nic_.get()), &endpoint, nullptr),
          "making the endpoint");
  endpoint_ = Owned(endpoint);
  checked(fi_ep_bind(endpoint, &addresses->fid, 0), "binding the endpoint");
  checked(fi_ep_bind(endpoint, &port_.completions()->fid, FI_TRANSMIT | FI_RECV), "binding the endpoint");
  checked(fi_enable(endpoint), "enabling the endpoint");
}

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
  attributes.requested_key = port_.fresh_key();
  attributes.iface = device ? FI_HMEM_CUDA : FI_HMEM_SYSTEM;
  attributes.device.cuda = device.value_or(0);
  fid_mr* mr = nullptr;
#ifdef FI_MR_DMABUF  // since libfabric 1.20; a library older than the headers is not opened
  if (dmabuf.descriptor >= 0) {
    const fi_mr_dmabuf range{dmabuf.descriptor, static_cast<std::uint64_t>(at - dmabuf.begin), bytes,
                             dmabuf.begin};
    fi_mr_attr by_descriptor = attributes;
    by_descriptor.dmabuf = &range;
    if (fi_mr_regattr(port_.domain(), &by_descriptor, FI_MR_DMABUF, &mr) < 0) mr = nullptr;
  }
#endif
  if (!mr)
    if (const int code = fi_mr_regattr(port_.domain(), &attributes, 0, &mr); code < 0)
      throw ResourceError(refusal(bytes, device.has_value(), nic_->fabric_attr->prov_name, error_text(code)));
  made.mr = Owned(mr);
  if (enrolls_alone()) {
    checked(fi_mr_bind(mr, &endpoint_->fid, 0), "binding a region");
    checked(fi_mr_enable(mr), "enabling a region");
  }
  made.key = fi_mr_key(mr);
  return made;
}

Operation* Channel::take_operation() {
  if (idle_.empty()) return &operations_.emplace_back();
  Operation* const operation = idle_.back();
  idle_.pop_back();
  return operation;
}

bool Channel::post(const Write& one, Batch& batch) {
  const Calls::Inside inside(port_.calls());
  Operation* const operation = take_operation();
  operation->channel = this;
  operation->batch = &batch;
  operation->peer = one.peer;
  const auto code = fi_writedata(endpoint_.get(), one.from, one.bytes, one.descriptor, one.immediate,
                                 peers_[static_cast<std::size_t>(one.peer)], one.to, one.key, operation);
  if (code != 0) idle_.push_back(operation);
  if (code == -FI_EAGAIN) return false;
  if (code != 0) port_.failed(one.peer, error_text(code));
  batch.add();
  return true;
}

bool Channel::try_inject(const Write& one) {
  const Calls::Inside inside(port_.calls());
  const auto code = fi_inject_writedata(endpoint_.get(), one.from, one.bytes, one.immediate,
                                        peers_[static_cast<std::size_t>(one.peer)], one.to, one.key);
  if (code == -FI_EAGAIN) return false;
  if (code != 0) port_.failed(one.peer, error_text(code));
  return true;
}

bool Channel::progress() {
  bool any = false;
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

}  // namespace unisono::fabric
