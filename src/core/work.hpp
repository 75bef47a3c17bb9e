// Calls that have begun, and the thread that runs them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.hpp"
#include "base/process.hpp"
#include "core/request.hpp"
#include "core/turns.hpp"
#include "unisono/work.hpp"

namespace unisono {

struct [[gnu::visibility("hidden")]] Work::State {
  using Callbacks = std::vector<std::function<void()>>;
  explicit State(std::string_view name) : what(name) {}
  virtual ~State() = default;
  // Moves the call on in a thread that waits for it, until it has ended or a time has come. May return at
  // once.
  virtual void move_on(std::optional<Clock::time_point>) {}
  // Returns the callbacks, which the caller runs.
  Callbacks end(std::exception_ptr with, Received with_message = {}) {
    Callbacks all;
    {
      const std::scoped_lock lock(mutex);
      error = std::move(with);
      received = with_message;
      done.store(true, std::memory_order_release);
      all.swap(callbacks);
    }
    ended.notify_all();
    return all;
  }

  const std::string what;
  const unsigned forks_before = forks();
  std::mutex mutex;
  std::condition_variable ended;
  std::atomic<bool> done = false;
  std::exception_ptr error;
  Received received;
  Callbacks callbacks;
};

// A call and what its request points to.
struct Begun {
  Begun(Collective name, const Call& from) : collective(name), call(from) {}
  Collective collective;
  Call call;
  std::optional<Request> request;  // none: a barrier
  bool pair = false;               // between two ranks
  int to = -1, from = -1;
};

// Runs calls in the order of their turns, in a thread that the first of them makes. While it runs callbacks,
// which may wait for calls, another thread runs what comes. The destructor waits until all has run.
class CallThreads {
 public:
  using Callbacks = Work::State::Callbacks;
  // thrown(why): a callback has thrown.
  explicit CallThreads(std::function<void(const std::string&)> thrown);
  ~CallThreads();
  CallThreads(const CallThreads&) = delete;

  // Takes a turn for a call. When it has come, run(number) runs the call and returns its callbacks.
  // Throws ResourceError if the system has no thread.
  void add(Turns& turns, std::function<Callbacks(Turns::Number)> run);
  // Runs something beside the calls, in a thread that does nothing else meanwhile.
  // Throws ResourceError if the system has no thread. Callbacks then wait for one of these.
  void run_beside(std::function<void()> what);
  void run_beside(Callbacks callbacks);
  // Returns what runs callbacks in the thread that calls it, once. Others wait for that as for its own
  // threads.
  std::function<void()> lend(Callbacks callbacks);
  // Waits until all has run, except the callback that this may be.
  void settle();

 private:
  struct Jobs;
  const std::shared_ptr<Jobs> jobs_;
};

}  // namespace unisono
