// Communicators of several nodes as threads of the test's process, over a transport between threads or the
// fabric's.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fabric_here.hpp"
#include "ranks.hpp"
#include "thread_transport.hpp"
#include "unisono/communicator.hpp"

namespace unisono::test {

// Behind a layout: over the fabric's transport, or over one between threads that has only records.
constexpr const char *kFabric = "/fabric", *kRecords = "/records";
inline int ranks_of(const std::string& layout) {
  return static_cast<int>(std::min(layout.find('/'), layout.size()));
}

// Tests by layout. Those over the fabric are left out where it is missing.
class OnLayout : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!GetParam().ends_with(kFabric)) return;
    if (const std::string why = no_fabric(""); !why.empty()) GTEST_SKIP() << why;
  }
};

// Runs body(comm) on a thread for each letter of `layout`, which names the rank's node. room: for
// records to a rank, of the transport between threads; 0: it has none.
inline void on_layout(const std::string& layout, const Communicator::Options& options,
                      const std::function<void(Communicator&)>& body,
                      const std::shared_ptr<Post>& post = std::make_shared<Post>(), std::size_t room = 3) {
  const int n = ranks_of(layout);
  const bool over_fabric = layout.ends_with(kFabric);
  post->room = room;
  post->records_only = layout.ends_with(kRecords);
  const auto bootstraps = thread_bootstraps(n, std::chrono::seconds(120));
  auto rank = [&](int r) {
    try {
      const auto at = static_cast<std::size_t>(r);
      Communicator::Options own = options;
      own.node = layout.substr(at, 1);
      own.transport = [&]() -> std::shared_ptr<Transport> {
        if (over_fabric) return fabric_transport(*bootstraps[at], own);
        return std::make_shared<ThreadTransport>(post, r);
      };
      Communicator comm(bootstraps[at], own);
      body(comm);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << r << " of " << layout << ": " << error.what();
    }
  };
  std::vector<std::thread> threads;
  for (int r = 1; r < n; ++r) threads.emplace_back(rank, r);
  rank(0);
  for (std::thread& thread : threads) thread.join();
}
inline void on_layout(const std::string& layout, const std::function<void(Communicator&)>& body) {
  on_layout(layout, {.timeout_s = 120, .check = false}, body);
}

}  // namespace unisono::test
