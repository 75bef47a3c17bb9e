// The order of a communicator's calls: one at a time, in the order in which they come, from any thread.
#pragma once

#include <atomic>
#include <cstdint>
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
    Turn(Turns& of, Number mine) noexcept : of_(of) {
      for (Number now; (now = of_.now_.load(std::memory_order_acquire)) != mine;)
        of_.now_.wait(now, std::memory_order_acquire);
      of_.inside_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ~Turn() {
      of_.inside_.store({}, std::memory_order_relaxed);
      of_.now_.fetch_add(1, std::memory_order_release);
      of_.now_.notify_all();
    }
    Turn(const Turn&) = delete;

   private:
    Turns& of_;
  };

  // Returns whether this thread is within a turn, so that it would wait for itself.
  bool inside() const { return inside_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

 private:
  std::atomic<Number> next_ = 0, now_ = 0;
  std::atomic<std::thread::id> inside_{};
};

}  // namespace unisono
