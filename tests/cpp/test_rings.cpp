// Chunks between the ranks of a machine: rings, and cells that change hands.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "host/host_thread.hpp"
#include "lane/channel.hpp"

namespace unisono {
namespace {

constexpr std::size_t kChunk = std::size_t{64} << 10;
using Channel = ChunkChannel<HostThread>;

// Runs `body` on as many ranks, each in a thread. All memory has pages from the begin.
template <class Body>
void on_ranks(int ranks, const Body& body) {
  const HostThread::Layout layout(ranks, kChunk, 128);
  std::vector<std::shared_ptr<Segment>> segments;
  for (int r = 0; r < ranks; ++r) segments.push_back(Segment::create(layout.bytes));
  HostThread::Watch watch;
  watch.interrupted = [](int, const auto&) {};
  watch.late = [](int, Slot, std::uint32_t, std::uint32_t) { std::abort(); };
  watch.differs = [](int) { std::abort(); };
  watch.fill = [](int, const byte*, std::size_t) {};
  watch.begin_ring = [](std::size_t) {};
  watch.waits = [](int) {};
  const host::Patience patience{.spins = 1000, .timeout = std::chrono::seconds(60)};
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      const host::Far far(std::vector<int>(static_cast<std::size_t>(ranks)), {});
      HostThread lane(r, layout, segments, far, patience, watch);
      Channel channel(lane);
      body(lane, channel);
    });
  for (std::thread& thread : threads) thread.join();
}

std::size_t any_size(std::mt19937& random) {
  const std::size_t most = random() % 2 == 0 ? kChunk : random() % kChunk + 1;
  return random() % most + 1;
}

void send(Channel& channel, int peer, std::size_t bytes, std::uint32_t what) {
  const Dst to = channel.reserve(peer, bytes);
  std::fill_n(to.at, bytes, static_cast<byte>(what));
  channel.commit(peer, bytes);
}

// Returns how many bytes of the next piece are not as they were sent.
std::size_t wrong_of(Channel& channel, int peer, std::size_t bytes, std::uint32_t what) {
  const byte* const piece = channel.arrived(peer, bytes);
  const auto right = std::count(piece, piece + bytes, static_cast<byte>(what));
  channel.release(peer);
  return bytes - static_cast<std::size_t>(right);
}

// Pieces of all sizes, sent as far ahead as there is room, arrive as they were: also while both ends confine
// large ones, and let them go around the whole ring again.
TEST(Rings, KeepPiecesApart) {
  constexpr std::uint32_t kPieces = 3000, kTurn = 200;  // pieces until large ones go another way
  std::size_t wrong = 0;
  on_ranks(2, [&](HostThread& lane, Channel& channel) {
    std::mt19937 random(1);
    for (std::uint32_t i = 0; i < kPieces; ++i) {
      if (i % kTurn == 0) lane.confine_large(i / kTurn % 2 == 1);
      const std::size_t bytes = any_size(random);
      if (lane.rank() == 0) {
        send(channel, 1, bytes, i);
        continue;
      }
      if (i % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // the writer runs ahead
      wrong += wrong_of(channel, 0, bytes, i);
    }
  });
  EXPECT_EQ(wrong, 0);
}

// Pieces of an exchange go where the peer's last one came from, which no other rank reads any more.
TEST(Cells, ChangeHands) {
  std::size_t elsewhere = 0;
  on_ranks(2, [&](HostThread& lane, Channel& channel) {
    const int peer = 1 - lane.rank();
    std::size_t mine = 0;
    const byte* held = nullptr;
    for (std::size_t i = 0; i < 100; ++i) {
      const std::size_t bytes = 1 + i * 600;
      const byte* const to = channel.reserve(peer, bytes).at;
      mine += held && to != held;
      channel.commit(peer, bytes);
      held = channel.arrived(peer, bytes);
      channel.release(peer);
    }
    if (lane.rank() == 0) elsewhere = mine;
  });
  EXPECT_EQ(elsewhere, 0);
}

// Whoever sends to whom, and however often, pieces arrive as they were: by cells, by rings once a rank has
// none, and by cells again.
TEST(Cells, KeepPiecesApart) {
  for (const int ranks : {1, 2, 3, 5}) {
    std::atomic<std::size_t> wrong = 0;
    on_ranks(ranks, [&](HostThread& lane, Channel& channel) {
      std::mt19937 random(2);  // alike on every rank
      for (std::uint32_t i = 0; i < 4000; ++i) {
        const auto any = [&] { return static_cast<int>(random() % static_cast<unsigned>(ranks)); };
        const int from = any(), to = any();
        const std::uint32_t pieces = random() % (HostThread::kChunks / 2) + 1;
        const bool back = random() % 2 == 0, whole = random() % 8 == 0;
        const std::size_t bytes = whole ? kChunk : random() % 3000 + 1;
        lane.use_cells(random() % 16 > 0);
        const auto one_way = [&](int writer, int reader, std::uint32_t what) {
          for (std::uint32_t k = 0; k < pieces && lane.rank() == writer; ++k)
            send(channel, reader, bytes, what + k);
          for (std::uint32_t k = 0; k < pieces && lane.rank() == reader; ++k)
            wrong += wrong_of(channel, writer, bytes, what + k);
        };
        one_way(from, to, i);
        if (back) one_way(to, from, i + 7);
      }
    });
    EXPECT_EQ(wrong, 0) << ranks;
  }
}

// Cells that a rank has sent come from its peers again, and are as many as before.
TEST(Cells, AreNeverLost) {
  constexpr int kRanks = 3;
  std::vector<std::set<const byte*>> used(kRanks);
  on_ranks(kRanks, [&](HostThread& lane, Channel& channel) {
    for (int round = 0; round < 2000; ++round)
      for (int i = 1; i < kRanks; ++i) {
        const int to = peer_at(lane, round % 2 ? i : kRanks - i),
                  from = peer_at(lane, round % 2 ? kRanks - i : i);
        used[static_cast<std::size_t>(lane.rank())].insert(channel.reserve(to, 64).at);
        channel.commit(to, 64);
        channel.arrived(from, 64);
        channel.release(from);
      }
  });
  std::set<const byte*> all;
  for (const auto& of_rank : used) all.insert(of_rank.begin(), of_rank.end());
  EXPECT_LE(all.size(), kRanks * HostThread::Layout(kRanks, kChunk, 128).num_cells);
}

}  // namespace
}  // namespace unisono
