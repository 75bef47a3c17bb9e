#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include "tensors.hpp"

namespace unisono_torch {

namespace {

std::exception_ptr backend_error(const std::string& text) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, "unisono: " + text));
}

}  // namespace

std::exception_ptr as_torchs(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const unisono::TimeoutError& why) {
    return backend_error(std::string("the timeout has passed: ") + why.what());  // " timeout ", as gloo's say
  } catch (const unisono::Error& why) { return backend_error(why.what()); } catch (...) {
  }
  return error;
}

Ptr<c10d::Backend> torchs_own(const char* function, const Ptr<c10d::Store>& store, int rank, int size,
                              double timeout_s) {
  const py::gil_scoped_acquire gil;
  const auto make = py::module_::import("unisono.torch.distributed").attr(function);
  return make(store, rank, size, timeout_s).cast<Ptr<c10d::Backend>>();
}

std::vector<std::string> StoreBootstrap::all_gather(const std::string& data) {
  const std::string round = "unisono/" + std::to_string(gathers_++) + "/";
  store_->set(round + std::to_string(rank_), std::vector<uint8_t>(data.begin(), data.end()));
  std::vector<std::string> all;
  for (int r = 0; r < size_; ++r) {
    const std::vector<uint8_t> theirs = store_->get(round + std::to_string(r));
    all.emplace_back(theirs.begin(), theirs.end());
  }
  return all;
}

void Steps::finish() {
  if (after_.empty()) return;
  const NoGrad no_grad;
  for (const auto& what : after_) what();
}

void Steps::let_go() {
  after_.clear();
  kept_.clear();
}

// An error in the middle waits for the calls that have begun, which use the tensors.
void CallWork::start(Body body) noexcept {
  std::exception_ptr error;
  try {
    body(steps_);
  } catch (...) { error = std::current_exception(); }
  if (steps_.begun().empty()) return end(error);
  steps_.begun().back().then([self = Ptr<CallWork>::reclaim_copy(this), error] {
    for (const unisono::Work& one : self->steps_.begun())
      if (one.error()) return self->end(one.error());
    self->end(error);
  });
}

bool CallWork::wait(std::chrono::milliseconds timeout) {
  if (succeeded_.load(std::memory_order_acquire)) return true;
  if (c10d::isP2POp(opType_))
    for (const unisono::Work& one : steps_.begun()) try {
        if (timeout == kNoTimeout) one.wait();
        else one.wait(std::chrono::duration<double>(timeout).count());
      } catch (const unisono::Error&) {  // which torch's wait throws; or the time is up
        if (!one.done()) timeout = std::chrono::milliseconds(1);
      }
  return Work::wait(timeout);
}

void CallWork::end(std::exception_ptr error) noexcept {
  try {
    if (error) std::rethrow_exception(error);
    steps_.finish();
  } catch (...) { error = as_torchs(std::current_exception()); }
  steps_.let_go();
  Ptr<c10::ivalue::Future> future;
  {
    const std::scoped_lock lock(ending_);
    ended_ = true;
    error_ = error;
    future = future_;
  }
  if (future && error) future->setError(error);
  if (future && !error) future->markCompleted(c10::IValue(outputs_));
  const bool succeeded = !error;
  finish(std::move(error));
  succeeded_.store(succeeded, std::memory_order_release);
}

Ptr<c10::ivalue::Future> CallWork::getFuture() {
  const std::scoped_lock lock(ending_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (ended_ && error_) future_->setError(error_);
  if (ended_ && !error_) future_->markCompleted(c10::IValue(outputs_));
  return future_;
}

void exchange(Steps& call, std::vector<Message> messages) {
  static char empty = 0;  // a place for messages of no bytes
  while (!messages.empty()) {
    std::vector<unisono::Outgoing> sends;
    std::vector<unisono::Incoming> receives;
    std::vector<Message> later;
    std::set<std::pair<int, bool>> taken;
    for (const Message& one : messages) {
      if (!taken.insert({one.peer, one.sent}).second) {
        later.push_back(one);
        continue;
      }
      const at::Tensor at = one.sent ? packed(one.tensor) : written(call, one.tensor);
      void* const data = at.numel() ? call.keep(at).data_ptr() : &empty;
      if (one.sent) sends.push_back({data, at.nbytes(), one.peer});
      else receives.push_back({data, at.nbytes(), one.peer});
    }
    call.run(Call{.dtype = DType::u8}, sends, receives);
    messages = std::move(later);
  }
}

}  // namespace unisono_torch
