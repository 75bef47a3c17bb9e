#include "core/work.hpp"

#include <csignal>

#include <chrono>
#include <system_error>
#include <utility>

#include "base/deadline.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

// The thread does not exist in a forked child, and its locks may be held there for ever.
bool inherited(const Work::State& state) { return state.forks_before != forks(); }

std::exception_ptr error_of_child(const Work::State& state) {
  return std::make_exception_ptr(
      UsageError("this process was forked from a rank: wait for " + state.what + " in the rank."));
}

}  // namespace

void Work::wait(std::optional<double> timeout_s) const {
  if (!state_) return;
  if (inherited(*state_)) std::rethrow_exception(error_of_child(*state_));
  std::unique_lock lock(state_->mutex);
  const auto done = [this] { return state_->done; };
  if (!timeout_s) {
    state_->ended.wait(lock, done);
  } else if (const std::chrono::duration<double> most(check_timeout_s(*timeout_s));
             !state_->ended.wait_for(lock, most, done)) {
    throw TimeoutError(state_->what + " has not ended within " + std::to_string(*timeout_s) +
                       " s and goes on: wait again, and leave its buffers alone until then.");
  }
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Work::done() const {
  if (!state_ || inherited(*state_)) return true;
  const std::scoped_lock lock(state_->mutex);
  return state_->done;
}

std::exception_ptr Work::error() const {
  if (!state_) return {};
  if (inherited(*state_)) return error_of_child(*state_);
  const std::scoped_lock lock(state_->mutex);
  return state_->error;
}

// The thread takes no signals, which are the program's.
CallThread::CallThread() {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error& error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw ResourceError(std::string("the system has no thread for calls that begin (") + error.what() +
                        "): end some, or make calls that wait.");
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

CallThread::~CallThread() {
  {
    const std::scoped_lock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void CallThread::add(Turns& turns, std::function<void(Turns::Number)> run) {
  {
    const std::scoped_lock lock(mutex_);
    jobs_.push_back({std::move(run)});
    jobs_.back().number = turns.come();
  }
  changed_.notify_one();
}

void CallThread::loop() {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return ends_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job.run(job.number);
  }
}

}  // namespace unisono
