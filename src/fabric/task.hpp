// Coroutines over completions. A Task runs until it must wait. The completion that it waits for resumes it.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

namespace unisono::fabric {

class Task {
 public:
  struct promise_type {
    std::exception_ptr thrown;
    Task get_return_object() { return Task(Handle::from_promise(*this)); }
    std::suspend_never initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { thrown = std::current_exception(); }
  };
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  // Returns whether the task has ended. Rethrows the exception that has ended it, if any.
  bool done() const {
    if (!handle_.done()) return false;
    if (handle_.promise().thrown) std::rethrow_exception(handle_.promise().thrown);
    return true;
  }

 private:
  using Handle = std::coroutine_handle<promise_type>;
  explicit Task(Handle handle) : handle_(handle) {}
  Handle handle_;
};

// Writes that are waited for together, which a batch outlives. When done, their sources may be overwritten.
class Batch {
 public:
  void add() { ++open_; }
  void complete() { --open_; }
  bool done() const { return open_ == 0; }

 private:
  long open_ = 0;
};

}  // namespace unisono::fabric
