// The ranks of several nodes as threads of the test's process, over a transport between threads.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nodes/backend.hpp"
#include "ranks.hpp"
#include "reference.hpp"
#include "thread_transport.hpp"

namespace unisono::test {

// Runs `body` on a thread for each letter of `layout`, which names the rank's node. fails: see
// ThreadTransport. transport: returns a rank's transport, which replaces the ThreadTransport.
using Body = std::function<void(Communicator::Impl&)>;
struct World {
  std::string layout;
  nodes::Limits limits{};
  double timeout_s = 60;
  bool check = false;
  std::function<void(int rank, int exchange)> fails{};
  std::function<std::shared_ptr<Transport>(int rank)> transport{};
  std::shared_ptr<Post> post = std::make_shared<Post>();

  void run(const Body& body) const {
    const int n = static_cast<int>(layout.size());
    const auto bootstraps = thread_bootstraps(n, std::chrono::seconds(60));
    std::barrier<> made(n);  // no rank fails while another still makes its communicator
    auto rank = [&](int r) {
      bool waits = true;
      try {
        Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(r)];
        Communicator::Options options;
        options.timeout_s = timeout_s;
        options.check = check;
        options.transport = [&, r]() -> std::shared_ptr<Transport> {
          if (transport) return transport(r);
          auto failing = fails ? std::function<void(int)>([this, r](int exchange) { fails(r, exchange); })
                               : std::function<void(int)>();
          return std::make_shared<ThreadTransport>(post, r, std::move(failing));
        };
        auto place = nodes::meet(bootstrap, layout.substr(static_cast<std::size_t>(r), 1), check);
        nodes::NodesCommunicator comm(bootstrap, std::move(place), options, limits);
        waits = false;
        made.arrive_and_wait();
        body(comm);
      } catch (const std::exception& error) {
        if (waits) made.arrive_and_drop();
        ADD_FAILURE() << "rank " << r << " of " << layout << ": " << error.what();
      }
    };
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r) threads.emplace_back(rank, r);
    for (std::thread& thread : threads) thread.join();
  }
};

// Small limits, so that short inputs take many blocks.
inline constexpr nodes::Limits kSmall{
    .one_shot = 600, .chain = 2000, .shard = 64, .block = 256, .chain_block = 300};

inline Bytes rank_bytes(int rank, std::size_t bytes) {
  return random_bytes(bytes, 1000 + static_cast<std::uint64_t>(rank));
}

inline Request request(Communicator::Impl& comm, Collective collective, const Call& call) {
  return {collective, call, comm.rank(), comm.size()};
}

}  // namespace unisono::test
