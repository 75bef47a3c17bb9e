// An endpoint of a NIC, which writes to the same channel of every other rank and receives their writes.
#pragma once

#include <rdma/fi_rma.h>

#include <coroutine>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "cuda/nic.hpp"
#include "fabric/port.hpp"
#include "fabric/shm_file.hpp"
#include "fabric/task.hpp"
#include "lane/lane.hpp"

namespace unisono::fabric {

// A registration of memory that this rank writes from, or that peers write to, who then need the key.
struct Registration {
  Owned<fid_mr> mr;
  std::uint64_t key = 0;
  void* descriptor() const { return mr.get() ? mr->mem_desc : nullptr; }
};

struct Write {
  int peer = 0;
  const byte* from = nullptr;
  void* descriptor = nullptr;  // of the region that `from` lies in, if the provider wants one
  std::size_t bytes = 0;
  std::uint64_t to = 0, key = 0;  // as the peer has announced them
  std::uint32_t immediate = 0;
};

class Channel {
 public:
  explicit Channel(Port& port);  // which outlives it
  Channel(const Channel&) = delete;

  // For the bootstrap: `connect` takes the addresses of every rank's channel of this number, in rank order.
  std::string address() const;
  void connect(const std::vector<std::string>& addresses);
  // Removes the files that the provider has left on this machine of a rank that has died. For any thread.
  void bury(int peer) const noexcept;

  const fi_info& nic() const { return *nic_; }
  bool needs_local_registration() const { return (nic_->domain_attr->mr_mode & FI_MR_LOCAL) != 0; }
  // Returns whether peers name places of a region by addresses. If not, they name them by offsets.
  bool by_address() const { return (nic_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0; }
  // Returns whether a registration is for this channel only, not for all channels of the NIC.
  bool enrolls_alone() const { return (nic_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0; }
  std::size_t most_bytes() const { return nic_->ep_attr->max_msg_size; }

  // Registers memory. device: the GPU that has it. dmabuf: finds it for the NIC, if the driver gives one.
  // Neither is needed afterwards. Throws ResourceError, which says what to do, if the system refuses.
  Registration enroll(byte* at, std::size_t bytes, std::optional<int> device, const cuda::Dmabuf& dmabuf);

  // `co_await write(one, batch)` returns when the NIC has the write queued: at once, except if its queue is
  // full. The batch is complete when its writes are.
  struct Queued {
    Channel& channel;
    Write write;
    Batch& batch;
    bool await_ready() { return channel.blocked_by(write.peer).empty() && channel.post(write, batch); }
    void await_suspend(std::coroutine_handle<> writer) {
      channel.blocked_by(write.peer).push_back({this, writer});
    }
    void await_resume() const {}
  };
  Queued write(const Write& one, Batch& batch) { return {*this, one, batch}; }

  // Queues a write of at most 8 bytes, whose source may be overwritten at once. Returns false if the NIC's
  // queue is full: make progress and try again.
  bool try_inject(const Write& one);

  // Queues the writes that waited for room, and resumes their writers. Returns whether there were any.
  bool progress();
  void complete(Operation* operation);

  // Forgets the writes that wait for room, after a failure.
  void abandon() { blocked_.assign(blocked_.size(), {}); }

 private:
  struct Blocked {
    Queued* what;
    std::coroutine_handle<> writer;
  };
  std::deque<Blocked>& blocked_by(int peer) { return blocked_[static_cast<std::size_t>(peer)]; }
  bool post(const Write& one, Batch& batch);
  Operation* take_operation();

  void open();

  Port& port_;
  Info nic_;
  // destroyed in reverse: operations outlive the endpoint
  std::deque<Operation> operations_;
  std::vector<Operation*> idle_;
  std::vector<std::deque<Blocked>> blocked_;  // by peer: a peer that takes no writes holds up no other
  ShmLock file_;
  Owned<fid_av> addresses_;
  Owned<fid_ep> endpoint_;
  std::vector<std::string> known_;  // addresses, by peer
  std::vector<fi_addr_t> peers_;
};

}  // namespace unisono::fabric
