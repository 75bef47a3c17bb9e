// A NIC that a rank has opened, for all channels on it.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_eq.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "fabric/provider.hpp"
#include "fabric/task.hpp"
#include "fabric/watchdog.hpp"

namespace unisono::fabric {

// Closes a libfabric object.
template <class Object>
class Owned {
 public:
  Owned() = default;
  explicit Owned(Object* object) : object_(object) {}
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() {
    if (object_) object_->fid.ops->close(&object_->fid);
  }
  Object* get() const { return object_; }
  Object* operator->() const { return object_; }

 private:
  Object* object_ = nullptr;
};

class Channel;

// The context that libfabric hands back with a completion. The first member is libfabric's own space.
struct Operation {
  fi_context2 own;
  Channel* channel;
  Batch* batch;
  int peer;
};

// Has one completion queue for all channels: one poll of the NIC serves all.
class Port {
 public:
  // For Failed, in place of a peer: a peer that libfabric does not name, and the completion queue.
  static constexpr int kSomePeer = -1, kQueue = -2;
  using Failed = std::function<void(int peer, const std::string& why)>;
  using Arrived = std::function<void(std::uint32_t immediate)>;

  // completions: entries of the queue; 0: as many as its `channels` have writes in flight.
  Port(Info nic, int channels, Failed failed, Calls& calls, std::size_t completions);
  Port(const Port&) = delete;

  const Info& nic() const { return nic_; }
  fid_domain* domain() const { return domain_.get(); }
  fid_cq* completions() const { return completions_.get(); }
  Calls& calls() const { return calls_; }
  void failed(int peer, const std::string& why) const { failed_(peer, why); }

  // Returns a new key of a registration, for providers that leave the choice to the caller.
  std::uint64_t fresh_key() { return next_key_++; }

  // Reads completions: completes batches and passes immediates to `arrived`. Returns whether there were any.
  bool progress(const Arrived& arrived);

 private:
  void read_error();

  Info nic_;
  Failed failed_;
  Calls& calls_;
  std::uint64_t next_key_ = 1;
  // destroyed in reverse
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_cq> completions_;
};

}  // namespace unisono::fabric
