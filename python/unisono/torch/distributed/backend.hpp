// The torch.distributed backend `unisono`: what its calls are made of.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <unistd.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
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

// A call of the group: calls of its communicator, which run at once or begin, and what comes after them. It
// ends once, and so does its Future, which is made when it is asked for.
class CallWork final : public c10d::Work {
 public:
  CallWork(int rank, c10d::OpType type, const char* title, const std::optional<Tensors>& inputs,
           Tensors outputs, uint64_t number, unisono::Communicator& communicator, bool async)
      : Work(rank, type, title, inputs),
        outputs_(std::move(outputs)),
        number_(number),
        communicator_(&communicator),
        async_(async) {}

  // Makes the calls: body(*this) does.
  void start(const std::function<void(CallWork&)>& body) noexcept;
  // Makes a call, with the parameters of Communicator::run.
  template <class... Form>
  void run(const Form&... form) {
    if (async_) begun_.push_back(communicator_->begin(form...));
    else communicator_->run(form...);
  }
  // Keeps a tensor until the calls have ended.
  const at::Tensor& keep(const at::Tensor& tensor) { return async_ ? kept_.emplace_back(tensor) : tensor; }
  // Does something when the calls have ended without an error.
  void after(std::function<void()> what) { after_.push_back(std::move(what)); }

  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  Ptr<c10::ivalue::Future> getFuture() override;

 private:
  void end(std::exception_ptr error) noexcept;

  const Tensors outputs_;
  const uint64_t number_;
  unisono::Communicator* const communicator_;  // which outlives start()
  const bool async_;
  std::vector<unisono::Work> begun_;
  std::deque<at::Tensor> kept_;
  std::vector<std::function<void()>> after_;
  std::mutex ending_;  // of the future
  bool ended_ = false;
  std::exception_ptr error_;
  Ptr<c10::ivalue::Future> future_;
};

}  // namespace unisono_torch
