// Ranks as threads of the test's process.
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

namespace unisono::test {

// Runs `body(comm)` on every rank. A rank that ends by an exception fails the test; its peers then end by its
// departure.
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

// The text of the E that `call` throws; empty, and a failure of the test, when it throws none.
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

}  // namespace unisono::test
