// Ranks in processes of their own, whose copies by the kernel a test counts, and may make slow.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/process.hpp"
#include "processes.hpp"
#include "programs.hpp"
#include "unisono/tuning.hpp"

namespace unisono::test {

// How the kernel's copies seem to be while ranks meet (test_far_calls.cpp).
enum class Kernel { as_it_is, slow, fast, refuses };
inline Kernel kernel = Kernel::as_it_is;
inline constexpr std::size_t kLook = std::size_t{64}
                                     << 10;  // bytes of the copy that ranks time when they meet
inline int copies, looks;                    // by the kernel, that this process has made
inline unsigned delay_us = 0;                // of each of these copies
inline int dies_at = -1;                     // the number of the copy before which this process ends

inline constexpr int kMostRanks = 5;
inline constexpr std::size_t kRoom = std::size_t{8} << 20;
inline constexpr std::size_t kRest = std::numeric_limits<std::size_t>::max();

// Shared by the processes of a test.
struct Shared {
  static constexpr int kMeetings = 8;
  struct Meeting {
    std::atomic<int> come;
    std::array<char, 512> text[kMostRanks];
    std::size_t bytes[kMostRanks];
  } meetings[kMeetings];
  int copies[kMostRanks];  // of the call that is looked at
};

class ByMemory : public Bootstrap {
 public:
  ByMemory(Shared& shared, int rank, int size) : shared_(shared), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& data) override {
    Shared::Meeting& here = shared_.meetings[next_++];
    here.bytes[rank_] = data.copy(here.text[rank_].data(), here.text[rank_].size());
    for (++here.come; here.come < size_;) ::usleep(100);
    std::vector<std::string> all;
    for (int r = 0; r < size_; ++r) all.emplace_back(here.text[r].data(), here.bytes[r]);
    return all;
  }

 private:
  Shared& shared_;
  int rank_, size_, next_ = 0;
};

// Bytes of a message or a part, which both of its ends know.
inline Bytes content(int from, int to, std::size_t bytes) {
  const std::uint64_t seed =
      1 + static_cast<std::uint64_t>(from) * kMostRanks + static_cast<std::uint64_t>(to);
  return input_of({.dtype = DType::u8, .seed = seed}, from, bytes);
}

// A rank, in a process of its own.
struct Rank {
  Communicator& comm;
  Shared& shared;
  static constexpr std::size_t kPage = 4096;
  const std::unique_ptr<std::byte[]> memory = std::make_unique<std::byte[]>(kRoom + kPage);

  // Returns whether ranks learn which way calls go. Ranks that take turns on a core go as the plan says.
  bool learns() const { return comm.size() <= Cores::of_this_process().count(); }
  // Returns how many calls of a kind go through chunks before the kernel first copies.
  int before_kernel() const { return learns() ? 3 : 0; }
  // Begins a page: between some places of a page a copy goes in two parts.
  std::byte* room() const {
    return reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(memory.get()), kPage));
  }

  // Makes calls. Returns the kernel's copies that all ranks have made for them.
  int copied(const std::function<void()>& calls) {
    const int before = copies;
    calls();
    shared.copies[comm.rank()] = copies - before;
    comm.barrier();
    int all = 0;
    for (int r = 0; r < comm.size(); ++r) all += shared.copies[r];
    comm.barrier();
    return all;
  }

  // Sends a message to one rank and receives one from another, -1: neither.
  void message(int to, int from, std::size_t bytes, bool in_place = false) {
    const int me = comm.rank();
    std::byte* in = room() + 3;
    std::byte* out = in_place ? in : room() + kRoom / 2 + 1;
    if (to >= 0) {
      const Bytes sent = content(me, to, bytes);
      std::copy(sent.begin(), sent.end(), in);
    }
    const Call call{.in = in, .out = out, .count = bytes, .dtype = DType::u8};
    if (to < 0) comm.recv(call, from);
    else if (from < 0) comm.send(call, to);
    else comm.send_recv(call, to, from);
    if (from < 0) return;
    const Bytes expected = content(from, me, bytes);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out))
        << bytes << " bytes, " << from << " to " << me;
  }
};

// Large calls are direct from the first byte on, as far as the plan decides.
inline void plan_direct(Communicator& comm) {
  std::vector<PlanEntry> plan;
  for (const Collective collective :
       {Collective::all_reduce, Collective::reduce, Collective::broadcast, Collective::all_gather,
        Collective::gather, Collective::reduce_scatter, Collective::scatter, Collective::all_to_all,
        Collective::all_to_all_v, Collective::send_recv, Collective::all_reduce_rms_norm}) {
    const bool sums = collective == Collective::all_reduce || collective == Collective::all_reduce_rms_norm;
    plan.push_back({collective, false, kRest, sums ? "two_shot_direct" : "direct"});
  }
  Tuning(comm).set_plan(plan);
}

// Returns whether the kernel copies here.
inline bool possible(Rank& rank) {
  try {
    float in = 1, out[kMostRanks];
    rank.comm.all_gather({.in = &in, .out = out, .count = 1, .algorithm = "direct"});
  } catch (const UsageError&) { return false; }
  return true;
}

struct Setting {
  bool check = false, around = false;                                        // chunks go around the cache
  std::function<Kernel(int rank)> seems = [](int) { return Kernel::slow; };  // when the ranks meet
  bool copies = true;                                                        // the test needs the kernel's
};

// Runs body(rank) on `size` ranks. Expects that none fails.
inline void in_processes(int size, const std::function<void(Rank&)>& body, const Setting& setting = {}) {
  constexpr int kImpossible = 77;
  void* const memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto& shared = *new (memory) Shared{};
  auto play = [&](int r) {
    ::setenv("UNISONO_STREAM_CHUNKS", setting.around ? "1" : "0", 1);
    kernel = setting.seems(r);
    Communicator comm(std::make_shared<ByMemory>(shared, r, size), {.timeout_s = 60, .check = setting.check});
    kernel = Kernel::as_it_is;
    plan_direct(comm);
    Rank rank{comm, shared};
    if (setting.copies && !possible(rank)) return kImpossible;
    body(rank);
    return testing::Test::HasFailure() ? 1 : 0;
  };
  std::vector<std::unique_ptr<Child>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<Child>([&, r] { return play(r); }));
  bool impossible = false;
  for (const auto& rank : ranks) {
    impossible = impossible || rank->wait() == kImpossible;
    if (!impossible) { EXPECT_EQ(rank->wait(), 0); }
  }
  ::munmap(memory, sizeof(Shared));
  if (impossible) GTEST_SKIP() << "the kernel forbids copies here";
}

}  // namespace unisono::test
