// Ends the process when a call into libfabric does not return. While provider shm of libfabric before 1.20
// copies, it holds locks that processes share. A rank that is killed then leaves the others in a loop of the
// library, which nothing else ends.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace unisono::fabric {

// The calls of one thread at a time into the library.
class Calls {
 public:
  class Inside {
   public:
    explicit Inside(Calls& calls) : calls_(calls) {
      step(calls_.entered_, 1);
      step(calls_.depth_, 1);
    }
    ~Inside() { step(calls_.depth_, -1); }
    Inside(const Inside&) = delete;

   private:
    template <class T>
    static void step(std::atomic<T>& value, int by) {  // one writer: no locked instruction
      value.store(value.load(std::memory_order_relaxed) + static_cast<T>(by), std::memory_order_release);
    }
    Calls& calls_;
  };

  std::uint64_t entered() const { return entered_.load(std::memory_order_acquire); }
  bool inside() const { return depth_.load(std::memory_order_acquire) > 0; }

 private:
  std::atomic<std::uint64_t> entered_ = 0;
  std::atomic<int> depth_ = 0;
};

class Watchdog {
 public:
  // Returns the last words of the process, or nothing to let it live. The watchdog's thread asks repeatedly
  // about a call that has lasted `seconds`.
  using Verdict = std::function<std::string(double seconds)>;
  Watchdog(const Calls& calls, Verdict verdict);
  ~Watchdog();  // not in a forked child, which has no such thread
  Watchdog(const Watchdog&) = delete;

 private:
  void watch();

  const Calls& calls_;
  Verdict verdict_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool end_ = false;
  std::thread thread_;
};

}  // namespace unisono::fabric
