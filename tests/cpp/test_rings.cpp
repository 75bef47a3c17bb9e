// The rings of chunks between two threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "host/host_thread.hpp"
#include "lane/channel.hpp"

namespace unisono {
namespace {

// Pieces of all sizes, sent as far ahead as there is room, arrive as they were: also while both ends confine
// large ones, and let them go around the whole ring again.
TEST(Rings, KeepPiecesApart) {
  constexpr std::size_t kChunk = std::size_t{64} << 10;
  constexpr std::uint32_t kPieces = 3000, kTurn = 200;  // pieces until large ones go another way
  const HostThread::Layout layout(2, kChunk, 128);
  std::vector<std::shared_ptr<Segment>> segments;
  for (int r = 0; r < 2; ++r) segments.push_back(Segment::create(layout.bytes));
  HostThread::Watch watch;
  watch.interrupted = [](int, const auto&) {};
  watch.late = [](int, Slot, std::uint32_t, std::uint32_t) { std::abort(); };
  watch.differs = [](int) { std::abort(); };
  watch.fill = [](int, const byte*, std::size_t) {};
  watch.begin_ring = [](std::size_t) {};
  watch.waits = [](int) {};
  const host::Patience patience{.spins = 1000, .timeout = std::chrono::seconds(60)};

  const auto run = [&](int rank, const auto& piece) {
    HostThread lane(rank, layout, segments, host::Far({0, 0}, {}), patience, watch);
    ChunkChannel<HostThread> channel(lane);
    std::mt19937 random(1);
    for (std::uint32_t i = 0; i < kPieces; ++i) {
      if (i % kTurn == 0) lane.confine_large(i / kTurn % 2 == 1);
      const std::size_t most = random() % 2 == 0 ? kChunk : random() % kChunk + 1;
      piece(channel, i, random() % most + 1);
    }
  };
  std::thread writer([&] {
    std::vector<byte> data(kChunk);
    run(0, [&](auto& channel, std::uint32_t i, std::size_t bytes) {
      std::fill_n(data.begin(), bytes, static_cast<byte>(i));
      channel.put(1, data.data(), bytes);
    });
  });
  std::size_t wrong = 0;
  run(1, [&](auto& channel, std::uint32_t i, std::size_t bytes) {
    if (i % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // the writer runs ahead
    const byte* const piece = channel.arrived(0, bytes);
    for (std::size_t at = 0; at < bytes; ++at) wrong += piece[at] != static_cast<byte>(i);
    channel.release(0);
  });
  writer.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace unisono
