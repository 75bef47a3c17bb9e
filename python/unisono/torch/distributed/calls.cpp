#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "backend.hpp"

namespace unisono_torch {
namespace {

std::exception_ptr error_of(const std::string& text) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text));
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

std::vector<std::string> StoreBootstrap::all_gather(const std::string& data) {
  const std::string round = "unisono/" + std::to_string(gathers_++) + "/";
  store_->set(round + std::to_string(rank_), bytes_of(data));
  std::vector<std::string> all;
  for (int r = 0; r < size_; ++r) {
    const std::vector<uint8_t> theirs = store_->get(round + std::to_string(r));
    all.emplace_back(theirs.begin(), theirs.end());
  }
  return all;
}

// An error in the middle waits for the calls that have begun, which use the tensors.
void CallWork::start(const std::function<void(CallWork&)>& body) noexcept {
  std::exception_ptr error;
  try {
    const c10::InferenceMode no_grad;  // outputs may be tensors of that mode
    body(*this);
  } catch (...) { error = std::current_exception(); }
  if (begun_.empty()) return end(error);
  begun_.back().then([self = Ptr<CallWork>::reclaim_copy(this), error] {
    for (const unisono::Work& one : self->begun_)
      if (one.error()) return self->end(one.error());
    self->end(error);
  });
}

void CallWork::end(std::exception_ptr error) noexcept {
  try {
    if (error) std::rethrow_exception(error);
    const c10::InferenceMode no_grad;
    for (const auto& what : after_) what();
  } catch (const unisono::Error& why) {
    error = error_of(std::string("unisono: ") + why.what());
  } catch (...) { error = std::current_exception(); }
  after_.clear();
  kept_.clear();
  Ptr<c10::ivalue::Future> future;
  {
    const std::scoped_lock lock(ending_);
    ended_ = true;
    error_ = error;
    future = future_;
  }
  if (future && error) future->setError(error);
  if (future && !error) future->markCompleted(c10::IValue(outputs_));
  finish(std::move(error));
}

Ptr<c10::ivalue::Future> CallWork::getFuture() {
  const std::scoped_lock lock(ending_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (ended_ && error_) future_->setError(error_);
  if (ended_ && !error_) future_->markCompleted(c10::IValue(outputs_));
  return future_;
}

}  // namespace unisono_torch
