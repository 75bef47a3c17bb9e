#include "core/work.hpp"

#include <csignal>

#include <chrono>
#include <deque>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "base/deadline.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

thread_local const void* calling_back = nullptr;  // whose callbacks this thread runs

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
  std::optional<Clock::time_point> until;
  if (timeout_s)
    until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                               std::chrono::duration<double>(check_timeout_s(*timeout_s)));
  // a call that has ended takes no lock, since a transport in Python may hold it and wait for the GIL
  if (!state_->done.load(std::memory_order_acquire)) state_->move_on(until);
  std::unique_lock lock(state_->mutex);
  const auto done = [this] { return state_->done.load(); };
  if (!until) {
    state_->ended.wait(lock, done);
  } else if (!state_->ended.wait_until(lock, *until, done)) {
    throw TimeoutError(state_->what + " has not ended within " + std::to_string(timeout_s.value_or(0)) +
                       " s and goes on: wait again, and leave its buffers alone until then.");
  }
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Work::done() const {
  return !state_ || inherited(*state_) || state_->done.load(std::memory_order_acquire);
}

std::exception_ptr Work::error() const {
  if (!state_) return {};
  if (inherited(*state_)) return error_of_child(*state_);
  const std::scoped_lock lock(state_->mutex);
  return state_->error;
}

Received Work::received() const {
  if (!state_ || inherited(*state_)) return {};
  const std::scoped_lock lock(state_->mutex);
  return state_->received;
}

void Work::then(std::function<void()> callback) const {
  if (state_ && !inherited(*state_)) {
    const std::scoped_lock lock(state_->mutex);
    if (!state_->done) return state_->callbacks.push_back(std::move(callback));
  }
  callback();
}

// Threads share it, since one that destroys the communicator in a callback outlives CallThreads.
struct CallThreads::Jobs : std::enable_shared_from_this<Jobs> {
  struct Job {
    std::function<Callbacks(Turns::Number)> run;
    Turns::Number number = 0;
  };

  // Sees to it that threads take what there is, and a call that comes. Requires: the lock. Returns false if
  // the system has no thread: then those that there are do so later.
  bool serve(bool call_comes = false);
  void serve_or_throw(bool call_comes);
  bool next_call() const { return !waiting.empty() && !running; }
  void loop();
  void call_back(Callbacks callbacks) noexcept;
  void settle();

  std::function<void(const std::string&)> thrown;
  std::mutex mutex;
  std::condition_variable changed, settled;
  std::deque<Job> waiting;
  std::deque<std::function<void()>> beside;
  bool running = false;  // a call, as opposed to callbacks
  bool ends = false;
  int calling = 0;      // threads that run callbacks, or what is beside, and do not wait in settle()
  int idle = 0;         // threads
  std::string refusal;  // why the system has not given a thread
  std::vector<std::thread> threads;
};

bool CallThreads::Jobs::serve(bool call_comes) {
  // the thread of a call takes the next one
  const std::size_t needed = beside.size() + (!running && (call_comes || !waiting.empty()) ? 1 : 0);
  if (needed == 0) return true;
  if (static_cast<std::size_t>(idle) >= needed) {
    changed.notify_one();
    return true;
  }
  sigset_t all, before;  // signals are the program's
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    threads.emplace_back([self = shared_from_this()] { self->loop(); });
    refusal.clear();
  } catch (const std::system_error& error) { refusal = error.what(); }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return refusal.empty();
}

void CallThreads::Jobs::serve_or_throw(bool call_comes) {
  if (!serve(call_comes))
    throw ResourceError("the system has no thread for calls that begin (" + refusal +
                        "): end some, or make calls that wait.");
}

void CallThreads::Jobs::loop() {
  std::unique_lock lock(mutex);
  for (;;) {
    ++idle;
    changed.wait(lock, [this] { return !beside.empty() || next_call() || (ends && waiting.empty()); });
    --idle;
    if (beside.empty() && waiting.empty()) return;
    while (!beside.empty() || next_call()) {
      if (!beside.empty()) {
        std::function<void()> what = std::move(beside.front());
        beside.pop_front();
        ++calling;
        if (next_call()) serve();  // this thread does something else
        lock.unlock();
        std::exchange(what, nullptr)();
        lock.lock();
        --calling;
        settled.notify_all();
        continue;
      }
      Job job = std::move(waiting.front());
      waiting.pop_front();
      running = true;
      lock.unlock();
      Callbacks callbacks = job.run(job.number);
      job = {};
      lock.lock();
      running = false;
      settled.notify_all();
      if (callbacks.empty()) continue;
      ++calling;
      if (next_call()) serve();  // this thread does something else
      lock.unlock();
      call_back(std::move(callbacks));
      lock.lock();
      --calling;
      settled.notify_all();
    }
    if (ends) changed.notify_all();
  }
}

void CallThreads::Jobs::call_back(Callbacks callbacks) noexcept {
  const void* const before = std::exchange(calling_back, this);
  for (auto& callback : callbacks) {
    std::string why;
    try {
      std::exchange(callback, nullptr)();
      continue;
    } catch (const std::exception& error) { why = error.what(); } catch (...) {
      why = "no std::exception";
    }
    const std::scoped_lock lock(mutex);
    if (thrown) thrown(why);
  }
  calling_back = before;
}

void CallThreads::Jobs::settle() {
  std::unique_lock lock(mutex);
  const bool within = calling_back == this;
  if (within) --calling;
  settled.notify_all();  // another callback that waits here
  settled.wait(lock, [this] { return waiting.empty() && beside.empty() && !running && calling == 0; });
  if (within) ++calling;
}

CallThreads::CallThreads(std::function<void(const std::string&)> thrown) : jobs_(std::make_shared<Jobs>()) {
  jobs_->thrown = std::move(thrown);
}

// Takes part in the calls, since it may run in the callback of a thread that would have.
// NOLINTNEXTLINE(bugprone-exception-escape): a lack of memory ends the program here, as in a thread
CallThreads::~CallThreads() {
  {
    const std::scoped_lock lock(jobs_->mutex);
    jobs_->ends = true;
  }
  jobs_->changed.notify_all();
  jobs_->loop();
  for (;;) {
    std::vector<std::thread> threads;
    {
      const std::scoped_lock lock(jobs_->mutex);
      threads.swap(jobs_->threads);
    }
    if (threads.empty()) break;
    for (std::thread& thread : threads)
      if (thread.get_id() == std::this_thread::get_id()) thread.detach();
      else thread.join();
  }
  const int within = calling_back == jobs_.get() ? 1 : 0;
  std::unique_lock lock(jobs_->mutex);
  jobs_->settled.wait(lock, [&] { return jobs_->calling == within; });  // callbacks that were lent
  jobs_->thrown = nullptr;
}

void CallThreads::settle() { jobs_->settle(); }

void CallThreads::run_beside(std::function<void()> what) {
  const std::scoped_lock lock(jobs_->mutex);
  jobs_->beside.push_back(std::move(what));
  try {
    jobs_->serve_or_throw(false);
  } catch (...) {
    jobs_->beside.pop_back();
    throw;
  }
}

void CallThreads::run_beside(Callbacks callbacks) {
  if (callbacks.empty()) return;
  const std::scoped_lock lock(jobs_->mutex);
  jobs_->beside.emplace_back(
      [jobs = jobs_.get(), all = std::move(callbacks)]() mutable { jobs->call_back(std::move(all)); });
  jobs_->serve();
}

std::function<void()> CallThreads::lend(Callbacks callbacks) {
  const std::scoped_lock lock(jobs_->mutex);
  ++jobs_->calling;
  return [jobs = jobs_, all = std::move(callbacks)]() mutable {
    jobs->call_back(std::move(all));
    const std::scoped_lock lock(jobs->mutex);
    --jobs->calling;
    jobs->settled.notify_all();
  };
}

void CallThreads::add(Turns& turns, std::function<Callbacks(Turns::Number)> run) {
  const std::scoped_lock lock(jobs_->mutex);
  jobs_->serve_or_throw(true);
  jobs_->waiting.push_back({std::move(run), turns.come()});
}

}  // namespace unisono
