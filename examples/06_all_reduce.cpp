// The C++ call, on two ranks that are threads. In a program of several processes, derive a class from
// Bootstrap that exchanges bytes between them.
#include <cstdio>
#include <thread>
#include <vector>

#include "unisono/communicator.hpp"

int main() {
  const auto bootstraps = unisono::thread_bootstraps(2, std::chrono::seconds(30));
  std::vector<float> sums[2] = {std::vector<float>(1000), std::vector<float>(1000)};
  auto body = [&](int rank) {
    unisono::Communicator comm(bootstraps[static_cast<std::size_t>(rank)], {.timeout_s = 30});
    const std::vector<float> mine(1000, static_cast<float>(rank + 1));
    comm.all_reduce(
        {.in = mine.data(), .out = sums[rank].data(), .count = mine.size(), .op = unisono::Op::sum});
  };
  std::thread other(body, 1);
  body(0);
  other.join();
  std::printf("the sum is %g on rank 0 and %g on rank 1\n", sums[0][0], sums[1][0]);
  return sums[0][999] == 3 && sums[1][999] == 3 ? 0 : 1;
}
