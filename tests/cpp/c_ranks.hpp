// Ranks of the C interface that are threads and meet by a callback, and their data.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ints.hpp"
#include "unisono/unisono.h"

namespace unisono::test {

// An all_gather between threads.
struct Meeting {
  explicit Meeting(int ranks) : here(ranks) {}
  std::vector<char> bytes;
  std::barrier<> here;
};
struct Seat {
  Meeting* meeting;
  int rank, ranks;
};
inline int gather(void* user, const void* mine, std::size_t bytes, void* all) {
  const Seat& seat = *static_cast<Seat*>(user);
  Meeting& at = *seat.meeting;
  const std::size_t whole = bytes * static_cast<std::size_t>(seat.ranks);
  if (seat.rank == 0) at.bytes.resize(whole);
  at.here.arrive_and_wait();
  std::memcpy(at.bytes.data() + bytes * static_cast<std::size_t>(seat.rank), mine, bytes);
  at.here.arrive_and_wait();
  std::memcpy(all, at.bytes.data(), whole);
  at.here.arrive_and_wait();
  return 0;
}

using Body = std::function<void(unisono_comm*, int)>;

// Runs body(comm, rank) on every rank when all have their communicators.
inline void on_c_ranks(int ranks, const Body& body, double timeout_s = 120, bool check = false) {
  unisono_options options{};
  options.size = sizeof options;
  options.timeout_s = timeout_s;
  options.check = check;
  Meeting meeting(ranks);
  auto one = [&](int rank) {
    Seat seat{&meeting, rank, ranks};
    const unisono_bootstrap bootstrap{sizeof bootstrap, rank, ranks, gather, &seat};
    unisono_comm* comm = nullptr;
    ASSERT_EQ(unisono_init_by(&bootstrap, &options, &comm), UNISONO_OK) << unisono_error_text();
    EXPECT_EQ(unisono_rank(comm), rank);
    EXPECT_EQ(unisono_size(comm), ranks);
    meeting.here.arrive_and_wait();
    body(comm, rank);
    unisono_free(comm);
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < ranks; ++rank) threads.emplace_back(one, rank);
  one(0);
  for (std::thread& thread : threads) thread.join();
}

inline void ok(int status) { ASSERT_EQ(status, UNISONO_OK) << unisono_error_text(); }

// Expects an error of that status, whose text has `part`.
inline void expect_error(int status, int expected, const std::string& part) {
  EXPECT_EQ(status, expected);
  EXPECT_NE(std::string(unisono_error_text()).find(part), std::string::npos) << unisono_error_text();
}

inline unisono_call call_of(const void* in, void* out, std::size_t count, int dtype = UNISONO_I32) {
  unisono_call call{};
  call.size = sizeof call;
  call.in = in;
  call.out = out;
  call.count = count;
  call.dtype = dtype;
  return call;
}

inline std::int32_t sum(int ranks, std::size_t i) {
  std::int32_t all = 0;
  for (int r = 0; r < ranks; ++r) all += value(r, i);
  return all;
}

}  // namespace unisono::test
