// The torch.distributed backend `unisono`: what its calls are made of.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <unistd.h>

#include <algorithm>
#include <atomic>
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

// Thrown if the ranks are on several nodes, which no communicator joins here.
struct SeveralNodes {};

// How a call is made, as c10d's options say.
struct How {
  How() = default;
  template <class Options>
  How(const Options& options)  // NOLINT(google-explicit-constructor)
      : async(options.asyncOp),
        timeout_s(std::max(0.0, 1e-3 * static_cast<double>(options.timeout.count()))) {}
  bool async = true;
  double timeout_s = 0;  // on CPUs; 0: the group's
};

// The steps of a call of the group: calls of a communicator, and what comes after them.
class Steps {
 public:
  // Makes calls on host memory, which run at once or begin.
  Steps(unisono::Communicator& communicator, const How& how)
      : communicator_(&communicator), begins_(how.async), timeout_s_(how.timeout_s) {}
  // Makes calls on a GPU, which are enqueued on a stream.
  Steps(unisono::Communicator& communicator, void* stream)
      : communicator_(&communicator), memory_(unisono::Memory::device), stream_(stream) {}

  // Makes a call, with the parameters of Communicator::run.
  template <class... Form>
  void run(const Form&... form) {
    if (begins_) begun_.push_back(communicator_->begin(placed(form)...));
    else communicator_->run(placed(form)...);
  }
  // Keeps a tensor until the calls have ended. On a stream, what is freed is written again behind them.
  at::Tensor keep(const at::Tensor& tensor) {
    if (begins_) kept_.push_back(tensor);
    return tensor;
  }
  // Does something when the calls have ended without an error.
  void after(std::function<void()> what) { after_.push_back(std::move(what)); }

  const std::vector<unisono::Work>& begun() const { return begun_; }
  // Does what comes after the calls.
  void finish();
  void let_go();

 private:
  template <class Part>
  const Part& placed(const Part& part) const {
    return part;
  }
  unisono::Call placed(unisono::Call call) const {
    call.memory = memory_;
    call.stream = stream_;
    call.timeout_s = timeout_s_;
    return call;
  }

  unisono::Communicator* const communicator_;  // which outlives the making of the calls
  const bool begins_ = false;
  const double timeout_s_ = 0;
  const unisono::Memory memory_ = unisono::Memory::host;
  void* const stream_ = nullptr;
  std::vector<unisono::Work> begun_;
  Tensors kept_;
  std::vector<std::function<void()>> after_;
};
using Body = c10::function_ref<void(Steps&)>;  // makes the calls

// A call that torch's profiler, if it runs, sees with its title and inputs. Work's own record takes longer.
class ProfiledWork : public c10d::Work {
 protected:
  ProfiledWork(int rank, c10d::OpType type, const char* title, at::TensorList inputs)
      : ProfiledWork(rank, type, title, inputs,
                     at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value()) {}

 private:
  ProfiledWork(int rank, c10d::OpType type, const char* title, at::TensorList inputs, bool profiled)
      : Work(rank, type, profiled ? title : nullptr,
             profiled && !inputs.empty() ? std::optional(inputs.vec()) : std::nullopt) {}
};

// A call on host memory. It ends once, and so does its Future, which is made when it is asked for.
class CallWork final : public ProfiledWork {
 public:
  CallWork(int rank, c10d::OpType type, const char* title, at::TensorList inputs, Tensors outputs,
           uint64_t number, unisono::Communicator& communicator, const How& how)
      : ProfiledWork(rank, type, title, inputs),
        outputs_(std::move(outputs)),
        number_(number),
        steps_(communicator, how) {}

  // Makes the calls, which run at once or begin.
  void start(Body body) noexcept;

  // Moves a message on in the thread that waits for it.
  bool wait(std::chrono::milliseconds timeout) override;
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  int sourceRank() const override {
    return steps_.begun().empty() ? -1 : steps_.begun().back().received().source;
  }
  Ptr<c10::ivalue::Future> getFuture() override;

 private:
  void end(std::exception_ptr error) noexcept;

  const Tensors outputs_;
  const uint64_t number_;
  Steps steps_;
  std::mutex ending_;  // of the future
  bool ended_ = false;
  std::atomic<bool> succeeded_ = false;
  std::exception_ptr error_;
  Ptr<c10::ivalue::Future> future_;
};

// Returns the backend of torch's own that this function of unisono.torch.distributed makes.
Ptr<c10d::Backend> torchs_own(const char* function, const Ptr<c10d::Store>& store, int rank, int size,
                              double timeout_s);

// Returns an error of the library's as torch has it, and others as they are.
std::exception_ptr as_torchs(const std::exception_ptr& error);

// Does something, and throws errors of the library's as torch's.
template <class What>
auto by_torchs_errors(const What& what) {
  try {
    return what();
  } catch (...) { std::rethrow_exception(as_torchs(std::current_exception())); }
}

}  // namespace unisono_torch
