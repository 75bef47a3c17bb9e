// Ranks as threads of the test's process, and their errors.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "unisono/communicator.hpp"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define UNISONO_SANITIZED 1
#else
#define UNISONO_SANITIZED 0
#endif

// Keeps the thread sanitizer from reporting an error of a Work that both its thread and a waiter hold: the
// last of them frees it, and libstdc++ counts them in code that the sanitizer has not compiled. Weak: several
// files of a program have it.
#if defined(__SANITIZE_THREAD__)
extern "C" __attribute__((visibility("default"), weak)) const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release";
}
#endif

namespace unisono::test {

// Runs body(comm) on every rank. An exception of a rank fails the test, and ends the peers, as the rank
// leaves.
inline void on_ranks(int size, const Communicator::Options& options,
                     const std::function<void(Communicator&)>& body) {
  const auto bootstraps = thread_bootstraps(size, std::chrono::seconds(120));
  auto rank = [&](int r) {
    try {
      Communicator comm(bootstraps[static_cast<std::size_t>(r)], options);
      body(comm);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << r << " of " << size << ": " << error.what();
    }
  };
  std::vector<std::thread> threads;
  for (int r = 1; r < size; ++r) threads.emplace_back(rank, r);
  rank(0);
  for (std::thread& thread : threads) thread.join();
}
inline void on_ranks(int size, const std::function<void(Communicator&)>& body) {
  on_ranks(size, {.timeout_s = 120, .check = false}, body);
}

// Returns the text of the E that `call` throws. If `call` throws none, fails the test and returns "".
template <class E>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) { return error.what(); } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no error";
  return {};
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The text of each rank's error.
class Texts {
 public:
  explicit Texts(int ranks) : texts_(static_cast<std::size_t>(ranks)) {}
  std::string& operator[](int rank) { return texts_[static_cast<std::size_t>(rank)]; }
  void expect_one() const {
    EXPECT_FALSE(texts_[0].empty());
    for (const std::string& text : texts_) EXPECT_EQ(text, texts_[0]);
  }

 private:
  std::vector<std::string> texts_;
};

// One element for each of up to 8 ranks.
struct Words {
  float in[8] = {}, out[8] = {};
  Call call() { return {.in = in, .out = out, .count = 1}; }
};

}  // namespace unisono::test
