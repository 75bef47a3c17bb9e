// The wait loop: polls until something has happened, with a deadline.
#pragma once

#include <algorithm>
#include <chrono>

namespace unisono {

using Clock = std::chrono::steady_clock;

// The time between two looks at the peers.
inline constexpr Clock::duration kLook = std::chrono::milliseconds(5);
// The longest time between two looks that counts as waiting. A process that was stopped has not waited.
inline constexpr Clock::duration kMostCounted = std::chrono::milliseconds(200);

// Returns when done() is true. Calls rest(elapsed), which gives the core away, between two polls. Calls
// look() every kLook of waiting. Calls late() when the wait has counted `timeout`. look() and late() end the
// wait by an exception. The time in look() counts in full: look() may wait for others, as for Python's lock.
template <class Done, class Rest, class Look, class Late>
void wait_until(const Done& done, std::chrono::duration<double> timeout, const Rest& rest, const Look& look,
                const Late& late) {
  const auto began = Clock::now();
  auto looked = began;
  Clock::duration waited{};
  for (auto now = began;; now = Clock::now()) {
    if (done()) return;
    rest(now - began);
    if (now - looked < kLook) continue;
    look();
    waited += std::min(now - looked, kMostCounted);
    looked = Clock::now();
    waited += looked - now;
    if (waited > timeout && !done()) late();
  }
}

}  // namespace unisono
