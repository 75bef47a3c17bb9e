// A group's calls on the tensors of a GPU. They are enqueued on c10's streams of any device: nothing here
// needs the headers of CUDA.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <map>

#include "backend.hpp"

namespace unisono_torch {

// A communicator on a GPU, and a stream for its calls that run beside the program.
class Gpu final {
 public:
  // Meets the other ranks. Throws as a Communicator does.
  Gpu(const std::shared_ptr<unisono::Bootstrap>& bootstrap, c10::Device device,
      const unisono::Communicator::Options& options)
      : guard_(device.type()),
        communicator_(bootstrap, options),
        beside_(guard_.getStreamFromGlobalPool(device)),
        fork_(device.type()) {}

  c10::Device device() const { return beside_.device(); }
  c10::Stream current() const { return guard_.getStream(device()); }
  c10::Stream beside() const { return beside_; }
  unisono::Communicator& communicator() { return communicator_; }

  // Enqueues calls: on the current stream, or behind that on `beside`, which `end` is recorded on then.
  void enqueue(Body body, c10::Event* end);
  // Waits for what has been enqueued, and leaves.
  void close() noexcept;

 private:
  const c10::impl::VirtualGuardImpl guard_;
  unisono::Communicator communicator_;
  const c10::Stream beside_;
  std::mutex mutex_;  // of what goes to `beside_`
  c10::Event fork_;
};

// A call that has been enqueued. To wait for it lets the current stream wait; the host waits for a barrier
// alone.
class GpuWork final : public ProfiledWork {
 public:
  // beside: it has a stream of its own, so that it keeps its tensors until someone waits for it.
  GpuWork(const std::shared_ptr<Gpu>& gpu, int rank, c10d::OpType type, const char* title,
          at::TensorList inputs, Tensors outputs, uint64_t number, bool beside);
  ~GpuWork() override;

  void start(Body body);

  bool isCompleted() override;
  void synchronize() override;
  // Throws the group's failure, if it is known by now.
  bool wait(std::chrono::milliseconds timeout) override;
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  Ptr<c10::ivalue::Future> getFuture() override;

 private:
  void note_failure();

  const std::weak_ptr<Gpu> gpu_;
  const c10::Stream stream_;
  const Tensors outputs_;
  const uint64_t number_;
  const bool beside_;
  Tensors kept_;    // until the stream that uses them is waited for
  c10::Event end_;  // of a call beside others; else recorded when it is asked for
  Ptr<c10::ivalue::Future> future_;
};

// Several works as one.
class Works final : public c10d::Work {
 public:
  explicit Works(int rank) : Work(rank, c10d::OpType::COALESCED) {}
  void add(Ptr<c10d::Work> work) { all_.push_back(std::move(work)); }

  bool isCompleted() override;
  bool isSuccess() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  std::vector<Ptr<c10d::Work>> all_;
};

// The communicators of a group on its ranks' GPUs. All who need one make it when it is first needed.
class GpuGroup final {
 public:
  GpuGroup(Ptr<c10d::Store> store, int rank, int size, double timeout_s)
      : store_(std::move(store)), rank_(rank), size_(size), timeout_s_(timeout_s) {}

  // Returns the group's communicator for this device. Null: nccl carries the group, and `why` says why.
  std::shared_ptr<Gpu> all(c10::Device device);
  // Returns a communicator of this rank and one other, whose messages wait for no other call.
  std::shared_ptr<Gpu> pair(c10::Device device, int peer);
  const std::string& why() const { return why_; }
  // Returns torch's own backend for GPUs. Throws if this torch has none.
  Ptr<c10d::Backend> nccl();

  // Sets the deadline of later calls, and of communicators that are made later.
  void set_timeout(std::chrono::milliseconds timeout);
  void raise_if_failed();
  void abort(const std::string& why);
  void close() noexcept;

 private:
  std::shared_ptr<Gpu> find(c10::Device device, int peer);
  std::shared_ptr<Gpu> make(c10::Device device, int peer);

  const Ptr<c10d::Store> store_;
  const int rank_, size_;
  std::atomic<double> timeout_s_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<Gpu>> made_;  // by peer, or kEveryone; null: it cannot be
  std::string why_;
  Ptr<c10d::Backend> nccl_;
};

}  // namespace unisono_torch
