// Routes of a group's calls: to its communicators, and to gloo and nccl what those lack. Values that are
// equal on all ranks choose a route.
#pragma once

#include <atomic>

#include "blocks.hpp"
#include "gpu.hpp"
#include "tensors.hpp"

namespace unisono_torch {

// The options with which torch lets a group be made. Python copies them.
struct GroupOptions final : c10d::Backend::Options {
  explicit GroupOptions(double timeout_s)
      : Options("unisono", std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3))) {}
  // Overrides what torch has from 2.14 on.
  Ptr<Options> clone() const { return c10::make_intrusive<GroupOptions>(*this); }
};

// The backend but for its collectives.
class Routes : public c10d::Backend {
 public:
  // made: the communicator of its ranks; null: they meet in the store.
  Routes(const Ptr<c10d::Store>& store, int rank, int size, double timeout_s, std::string group,
         Ptr<c10d::Backend> gloo, std::unique_ptr<unisono::Communicator> made);
  ~Routes() override;

  const std::string getBackendName() const override { return "unisono"; }
  // Returns a copy: torch writes a split group's name and timeout there.
  Ptr<Options> getBackendOptions() override { return options_->clone(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_made_; }
  c10d::ErrorType getError() override;
  // Sets the group's deadline for later calls. Calls that a CUDA graph has captured keep theirs.
  void setTimeout(std::chrono::milliseconds timeout) override;

  Ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all) override {
    gloo_->monitoredBarrier(opts, wait_all);
  }

  Ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override;
  Ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override;
  Ptr<c10d::Work> recvAnysource(Tensors& tensors, int tag) override;

  // Until the end, calls run as they come, but for messages between GPUs, which run as one exchange then.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch_ = std::make_unique<Batch>(rank_); }
  Ptr<c10d::Work> endCoalescing() override;

  // Tensors on symmetric memory, for CPUs, whose device has no index.
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return communicator_ && device < 0; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Makes the backend of some ranks of the group. Collective. Each rank gives the ranks of its own new group,
  // in their order. A rank that is in none gives others and gets null.
  bool supportsSplitting() const override { return true; }
  Ptr<c10d::Backend> split(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                           const Ptr<Options>& options) override;

  void abort() override;
  void shutdown() override;

 protected:
  std::size_t ranks() const { return static_cast<std::size_t>(size_); }

  // Returns what carries a call on these tensors in place of a communicator, and says it once. Null: a
  // communicator does. op: of a reduction.
  Ptr<c10d::Backend> elsewhere(at::TensorList tensors, const char* what, const ReduceOp* op = nullptr);

  // Begins a call, or on host memory makes it and returns null: torch takes that for a call that needs no
  // wait, unless it registers each work. gpu: of tensors on a GPU; null: the group's.
  Ptr<c10d::Work> begin(c10d::OpType type, const char* title, How how, at::TensorList inputs,
                        at::TensorList outputs, Body body, std::shared_ptr<Gpu> gpu = nullptr);

  // Adds a call to the batch, if there is one.
  Ptr<c10d::Work> joined(Ptr<c10d::Work> work) {
    if (batch_ && work) batch_->works->add(work);
    return work;
  }

 private:
  // The calls between startCoalescing and endCoalescing.
  struct Batch {
    explicit Batch(int rank) : works(c10::make_intrusive<Works>(rank)) {}
    Ptr<Works> works;
    std::vector<Message> messages;
    Ptr<c10d::Backend> nccl;  // where it coalesces too
  };

  void say(const std::string& what) const;
  void say_once(const char* what, const char* carrier, const std::string& why);
  Ptr<c10d::Backend> by_gloo(const char* what, const std::string& why);
  Ptr<c10d::Backend> by_nccl(const char* what, const std::string& why);
  Ptr<c10d::Work> message(const Message& one, int tag);
  Ptr<c10d::Work> receive(c10d::OpType type, const Tensors& tensors, int from, int tag);
  Ptr<c10d::Work> barrier_of_gpus(c10::Device device, const c10d::BarrierOptions& opts);

  // torch asks each type of device for its part of a split, by one store, and both parts are of one backend.
  struct Split {
    int number = 0;  // of the group's splits
    Ptr<c10d::Store> store;
    c10::weak_intrusive_ptr<c10d::Backend> made{Ptr<c10d::Backend>()};
  };

  const pid_t process_ = ::getpid();
  const Ptr<c10d::Store> store_;
  const std::string group_;
  Ptr<c10d::Backend> gloo_;
  const bool log_;
  Ptr<GroupOptions> options_;
  std::unique_ptr<unisono::Communicator> communicator_;  // none: gloo carries everything on CPUs
  std::shared_ptr<Blocks> blocks_;
  std::unique_ptr<GpuGroup> gpus_;
  std::unique_ptr<Batch> batch_;
  Split last_split_;
  std::atomic<uint64_t> calls_made_ = 0;  // collectives, which all ranks count alike; no messages
  std::mutex said_mutex_;
  std::set<std::string> said_;
};

// Makes the backend, with the parameters of Routes.
Ptr<c10d::Backend> make_backend(const Ptr<c10d::Store>& store, int rank, int size, double timeout_s,
                                const std::string& group, const Ptr<c10d::Backend>& gloo,
                                std::unique_ptr<unisono::Communicator> made = nullptr);

}  // namespace unisono_torch
