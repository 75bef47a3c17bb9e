// Times an all_reduce of two threads from C++ beside what no exchange can beat by much: a flag's round trip
// between their cores, each thread on one. In turn, since a virtual machine's cores come near and go far.
//
//   g++ -O2 -std=c++20 -Iinclude tools/beside_flag.cpp -o beside_flag -pthread -L LIBRARIES -lunisono
//   ./beside_flag [BYTES...]
//
// Prints a JSON line for each size: microseconds of a round trip and of a call, and how many times the round
// trip a call takes. Each is the median over rounds of the mean over a round's calls, which come one right
// after the other; between its quartiles.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "unisono/communicator.hpp"

namespace {

constexpr int kRounds = 101, kTrips = 1000;
constexpr std::size_t kMost = std::size_t{1} << 20;

struct alignas(64) Flag {
  std::atomic<int> value = 0;
};
std::array<Flag, 2> flags;  // each is written by one thread

// Makes trips: each thread waits for the other's flag, rank 0 after it has raised its own.
void make_trips(int rank, int& count) {
  auto raise = [&](int to) {
    flags[static_cast<std::size_t>(rank)].value.store(to, std::memory_order_release);
  };
  auto await = [&](int value) {
    while (flags[static_cast<std::size_t>(1 - rank)].value.load(std::memory_order_acquire) < value) continue;
  };
  for (int i = 0; i < kTrips; ++i) {
    ++count;
    if (rank == 0) raise(count);
    await(count);
    if (rank == 1) raise(count);
  }
}

template <class Body>
double microseconds(int calls, const Body& body) {
  const auto began = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count() / calls;
}

std::array<double, 3> quartiles(std::vector<double> all) {
  std::ranges::sort(all);
  return {all[all.size() / 4], all[all.size() / 2], all[all.size() * 3 / 4]};
}

void print(std::size_t bytes, const std::vector<double>& trips, const std::vector<double>& calls) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < trips.size(); ++i) ratios.push_back(calls[i] / trips[i]);
  const auto trip = quartiles(trips), call = quartiles(calls), ratio = quartiles(ratios);
  std::printf("{\"bytes\": %zu, \"rounds\": %d, \"round_trip_us\": [%.3f, %.3f, %.3f], ", bytes, kRounds,
              trip[0], trip[1], trip[2]);
  std::printf("\"call_us\": [%.3f, %.3f, %.3f], \"ratio\": [%.2f, %.2f, %.2f]}\n", call[0], call[1], call[2],
              ratio[0], ratio[1], ratio[2]);
}

void take_core(int core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  if (pthread_setaffinity_np(pthread_self(), sizeof one, &one) != 0) {
    std::fprintf(stderr, "this process may not run on cores 0 and 1: give it both.\n");
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::size_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::min(kMost, std::size_t(std::atoll(argv[i]))));
  if (sizes.empty()) sizes = {8, 64, 512, 4096, 32768};
  const auto meet = unisono::thread_bootstraps(2, std::chrono::seconds(30));
  auto body = [&](int rank) {
    take_core(rank);
    unisono::Communicator comm(meet[static_cast<std::size_t>(rank)], {.timeout_s = 30});
    const std::vector<float> in(kMost / sizeof(float), 1.0f);
    std::vector<float> out(in.size());
    int count = 0;
    for (const std::size_t bytes : sizes) {
      const unisono::Call call{.in = in.data(), .out = out.data(), .count = bytes / sizeof(float)};
      const int calls = bytes <= 4096 ? 1000 : 100;
      std::vector<double> trips, took;
      for (int round = 0; round < kRounds; ++round) {
        comm.barrier();
        trips.push_back(microseconds(kTrips, [&] { make_trips(rank, count); }));
        comm.barrier();
        took.push_back(microseconds(calls, [&] {
          for (int i = 0; i < calls; ++i) comm.all_reduce(call);
        }));
      }
      if (rank == 0) print(bytes, trips, took);
    }
  };
  std::thread other(body, 1);
  body(0);
  other.join();
  return 0;
}
