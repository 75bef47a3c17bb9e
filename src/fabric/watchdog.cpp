#include "fabric/watchdog.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace unisono::fabric {
namespace {

constexpr std::chrono::milliseconds kLook{500};

}  // namespace

Watchdog::Watchdog(const Calls& calls, Verdict verdict)
    : calls_(calls), verdict_(std::move(verdict)), thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
  {
    const std::scoped_lock lock(mutex_);
    end_ = true;
  }
  ended_.notify_one();
  thread_.join();
}

// Counts looks, not time: a process that was stopped has not waited.
void Watchdog::watch() {
  std::unique_lock lock(mutex_);
  std::uint64_t last = 0;
  int looks = 0;
  while (!ended_.wait_for(lock, kLook, [this] { return end_; })) {
    const std::uint64_t now = calls_.entered();
    looks = calls_.inside() && now == last ? looks + 1 : 0;
    last = now;
    if (looks == 0) continue;
    const std::string text = verdict_(looks * std::chrono::duration<double>(kLook).count());
    if (text.empty()) continue;
    std::fprintf(stderr, "unisono: %s\n", text.c_str());
    std::fflush(stderr);
    std::_Exit(EXIT_FAILURE);
  }
}

}  // namespace unisono::fabric
