// The order of a communicator's calls: one at a time, in the order in which they come, from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace unisono {

class Turns {
 public:
  using Number = std::uint32_t;

  // Returns the place of a call that has come. The call must have its turn, also if nothing is left to do.
  Number come() noexcept { return next_.fetch_add(1, std::memory_order_relaxed); }

  // A call's turn, from its begin on. Waits for the calls before, each of which has its own deadlines.
  class Turn {
   public:
    Turn(Turns& of, Number mine) : of_(of), mine_(mine) {
      if (of_.now_.load(std::memory_order_acquire) != mine) of_.wait(mine);
      of_.inside_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ~Turn() {
      of_.inside_.store({}, std::memory_order_relaxed);
      of_.now_.store(mine_ + 1, std::memory_order_release);
      if (of_.waiting_.load(std::memory_order_relaxed) > 0) of_.wake();
    }
    Turn(const Turn&) = delete;

   private:
    Turns& of_;
    const Number mine_;
  };

  // Returns whether this thread is within a turn, so that it would wait for itself.
  bool inside() const { return inside_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

 private:
  // Order: the end of a turn may miss a call that begins to wait, since a fence would cost each call about 8
  // ns. That call looks again after kMissed.
  void wait(Number mine) {
    constexpr std::chrono::milliseconds kMissed(1);
    ++waiting_;
    {
      std::unique_lock lock(mutex_);
      while (now_.load(std::memory_order_acquire) != mine) ended_.wait_for(lock, kMissed);
    }
    --waiting_;
  }
  void wake() {
    { const std::scoped_lock lock(mutex_); }
    ended_.notify_all();
  }

  std::atomic<Number> next_ = 0, now_ = 0;
  std::atomic<int> waiting_ = 0;  // calls
  std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<std::thread::id> inside_{};
};

}  // namespace unisono
