// The work on a block of a sum: a coroutine that yields where it would wait for other nodes.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

namespace unisono::nodes {

class Steps {
 public:
  struct promise_type {
    std::exception_ptr thrown;
    Steps get_return_object() { return Steps(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    std::suspend_always yield_value(int) noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { thrown = std::current_exception(); }
  };
  Steps(Steps&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Steps& operator=(Steps&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Steps() {
    if (handle_) handle_.destroy();
  }

  // Runs to the next yield and returns true, or to the end and returns false. Rethrows what has ended it.
  bool next() {
    handle_.resume();
    if (handle_.promise().thrown) std::rethrow_exception(handle_.promise().thrown);
    return !handle_.done();
  }

 private:
  using Handle = std::coroutine_handle<promise_type>;
  explicit Steps(Handle handle) : handle_(handle) {}
  Handle handle_;
};

}  // namespace unisono::nodes
