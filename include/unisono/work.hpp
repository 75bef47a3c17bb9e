// A call that has begun, and runs beside the program.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>

#include "unisono/version.hpp"

namespace unisono {

// The message that a receive with a tag has taken.
struct Received {
  int source = -1;  // the sender's rank; -1: nothing
  std::size_t bytes = 0;
};

// A handle of such a call. Copies are of the same call, which goes on without them. A handle without a call
// is done.
class Work {
 public:
  Work() = default;

  // Waits until the call has ended, and throws its error. timeout_s: throws TimeoutError if the call has not
  // ended by then; the call goes on, and its buffers stay in use.
  UNISONO_API void wait(std::optional<double> timeout_s = {}) const;
  // Returns whether the call has ended, also with an error.
  UNISONO_API bool done() const;
  // Returns the error with which the call has ended. Null: the call is under way, or has succeeded.
  UNISONO_API std::exception_ptr error() const;
  // Calls `callback` once when the call has ended: in a thread of the communicator, or here and now if the
  // call has ended already, or, of a message with a tag, within a `wait` for it. The callback may make and
  // begin calls, and may wait for them. What it throws aborts the communicator, unless it runs here and now.
  UNISONO_API void then(std::function<void()> callback) const;

  // Returns what a receive with a tag has taken, if it has ended.
  UNISONO_API Received received() const;

  struct State;

 private:
  friend class Communicator;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace unisono
