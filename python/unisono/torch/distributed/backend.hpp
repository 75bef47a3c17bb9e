// The torch.distributed backend `unisono`: what its calls are made of.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "unisono/communicator.hpp"

namespace unisono_torch {

template <class T>
using Ptr = c10::intrusive_ptr<T>;
using Tensors = std::vector<at::Tensor>;

// How the ranks of a group meet: by keys of torch's store.
class StoreBootstrap final : public unisono::Bootstrap {
 public:
  StoreBootstrap(Ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& data) override;

 private:
  const Ptr<c10d::Store> store_;
  const int rank_, size_;
  int gathers_ = 0;
};

// A call of the group. It ends once, and so does its Future, which is made when it is asked for.
class CallWork final : public c10d::Work {
 public:
  CallWork(int rank, c10d::OpType type, const char* title, const std::optional<Tensors>& inputs,
           Tensors outputs, uint64_t number, std::function<void()> body)
      : Work(rank, type, title, inputs),
        outputs_(std::move(outputs)),
        number_(number),
        body_(std::move(body)) {}

  // Runs the call, and lets go of its inputs.
  void run() noexcept;
  // Ends a call that has not run.
  void end(std::exception_ptr error) noexcept;

  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  Ptr<c10::ivalue::Future> getFuture() override;

 private:
  const Tensors outputs_;
  const uint64_t number_;
  std::function<void()> body_;
  std::mutex ending_;  // of the future
  bool ended_ = false;
  std::exception_ptr error_;
  Ptr<c10::ivalue::Future> future_;
};

// Runs the calls of a group one at a time, in the order in which they come: inline where the caller waits
// and nothing came before, else in a thread.
class Calls {
 public:
  // inline_allowed: the caller waits for the call anyway.
  void add(const Ptr<CallWork>& work, bool inline_allowed);
  // Ends the thread. Calls that have not run end with an error. stop: makes the one that runs end.
  void end(const std::function<void()>& stop) noexcept;

 private:
  void loop();

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Ptr<CallWork>> waiting_;
  bool running_ = false, ends_ = false;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace unisono_torch
