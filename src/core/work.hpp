// Calls that have begun, and the thread that runs them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/process.hpp"
#include "core/request.hpp"
#include "core/turns.hpp"
#include "unisono/work.hpp"

namespace unisono {

struct [[gnu::visibility("hidden")]] Work::State {
  explicit State(std::string_view name) : what(name) {}
  void end(std::exception_ptr with) {
    {
      const std::scoped_lock lock(mutex);
      error = std::move(with);
      done = true;
    }
    ended.notify_all();
  }

  const std::string what;
  const unsigned forks_before = forks();
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  std::exception_ptr error;
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

// A thread that runs calls in the order of their turns. The destructor waits until all that came have run.
class CallThread {
 public:
  // Throws ResourceError if the system has no thread.
  CallThread();
  ~CallThread();
  CallThread(const CallThread&) = delete;

  // Takes a turn for a call, which runs when the turn has come: run(number).
  void add(Turns& turns, std::function<void(Turns::Number)> run);

 private:
  struct Job {
    std::function<void(Turns::Number)> run;
    Turns::Number number = 0;
  };
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace unisono
