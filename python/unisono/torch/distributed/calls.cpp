#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <csignal>

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

void CallWork::run() noexcept {
  std::exception_ptr error;
  try {
    const c10::InferenceMode no_grad;  // outputs may be tensors of that mode
    body_();
  } catch (const unisono::Error& why) {
    error = error_of(std::string("unisono: ") + why.what());
  } catch (...) { error = std::current_exception(); }
  body_ = nullptr;
  end(error);
}

void CallWork::end(std::exception_ptr error) noexcept {
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

void Calls::add(const Ptr<CallWork>& work, bool inline_allowed) {
  if (process_ != ::getpid())
    std::rethrow_exception(
        error_of("unisono: this process was forked from a rank: make the call in the rank."));
  std::unique_lock lock(mutex_);
  if (ends_) std::rethrow_exception(error_of("unisono: the process group has been shut down."));
  if (inline_allowed && !running_ && waiting_.empty()) {
    running_ = true;
    lock.unlock();
    work->run();
    lock.lock();
    running_ = false;
    if (!waiting_.empty() || ends_) changed_.notify_all();
    return;
  }
  waiting_.push_back(work);
  if (!thread_) {
    sigset_t all, before;  // signals are the program's
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::make_unique<std::thread>([this] { loop(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  changed_.notify_all();
}

void Calls::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ends_ || (!waiting_.empty() && !running_); });
    if (ends_) return;
    Ptr<CallWork> work = std::move(waiting_.front());
    waiting_.pop_front();
    running_ = true;
    lock.unlock();
    work->run();
    work.reset();
    lock.lock();
    running_ = false;
  }
}

void Calls::end(const std::function<void()>& stop) noexcept {
  std::deque<Ptr<CallWork>> left;
  {
    const std::scoped_lock lock(mutex_);
    ends_ = true;
    left.swap(waiting_);
    if (running_) stop();
  }
  changed_.notify_all();
  for (const auto& work : left) work->end(error_of("unisono: the process group has been shut down."));
  if (thread_ && thread_->get_id() == std::this_thread::get_id()) {  // a callback of a call's Future
    thread_->detach();
    thread_.reset();
    return;
  }
  if (thread_) thread_->join();
  thread_.reset();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !running_; });  // an inline call of another thread
}

}  // namespace unisono_torch
