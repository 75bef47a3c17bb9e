// Communicators of several nodes as threads of the test's process, over a transport between threads.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ranks.hpp"
#include "thread_transport.hpp"
#include "unisono/communicator.hpp"

namespace unisono::test {

// Runs body(comm) on a thread for each letter of `layout`, which names the rank's node. The transport has
// room for three records to a rank.
inline void on_layout(const std::string& layout, const Communicator::Options& options,
                      const std::function<void(Communicator&)>& body,
                      const std::shared_ptr<Post>& post = std::make_shared<Post>()) {
  post->room = 3;
  const auto bootstraps = thread_bootstraps(static_cast<int>(layout.size()), std::chrono::seconds(120));
  auto rank = [&](int r) {
    try {
      const auto at = static_cast<std::size_t>(r);
      Communicator::Options own = options;
      own.node = layout.substr(at, 1);
      own.transport = [&post, r] { return std::make_shared<ThreadTransport>(post, r); };
      Communicator comm(bootstraps[at], own);
      body(comm);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << r << " of " << layout << ": " << error.what();
    }
  };
  std::vector<std::thread> threads;
  for (int r = 1; r < static_cast<int>(layout.size()); ++r) threads.emplace_back(rank, r);
  rank(0);
  for (std::thread& thread : threads) thread.join();
}
inline void on_layout(const std::string& layout, const std::function<void(Communicator&)>& body) {
  on_layout(layout, {.timeout_s = 120, .check = false}, body);
}

}  // namespace unisono::test
