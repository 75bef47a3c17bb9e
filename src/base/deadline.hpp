// The wait loop: polls until something has happened, with a deadline.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "unisono/error.hpp"

namespace unisono {

using Clock = std::chrono::steady_clock;

// The time between two looks at the peers.
inline constexpr Clock::duration kLook = std::chrono::milliseconds(5);
// The longest time between two looks that counts as waiting. A process that was stopped has not waited.
inline constexpr Clock::duration kMostCounted = std::chrono::milliseconds(200);

// Returns a deadline in seconds. Throws UsageError for what is none.
inline double check_timeout_s(double seconds) {
  constexpr double kMost = 1e9;  // clocks count them in narrow numbers
  if (seconds > 0 && seconds <= kMost) return seconds;
  throw UsageError("timeout_s=" + std::to_string(seconds) +
                   " is no deadline: give seconds above 0, at most 1e9.");
}

// Returns when done() is true. Calls rest(elapsed), which gives the core away, between two polls. Calls
// look() every kLook of waiting. Calls late() when the wait has counted `timeout`. look() and late() end the
// wait by an exception. The time in look() counts in full: look() may wait for others, as for Python's lock.
template <class Done, class Rest, class Look, class Late>
void wait_until(const Done& done, std::chrono::duration<double> timeout, const Rest& rest, const Look& look,
                const Late& late) {
  const auto began = Clock::now();
  auto looked = began;
  Clock::duration waited{};
  for (auto now = began; !done();) {
    rest(now - began);
    now = Clock::now();
    if (now - looked < kLook) continue;
    look();
    waited += std::min(now - looked, kMostCounted);
    looked = Clock::now();
    waited += looked - now;
    if (waited > timeout && !done()) late();
  }
}

}  // namespace unisono
