// The way of chunks that a writer learns from times. Times are made up.
#include "host/chunk_way.hpp"

#include <gtest/gtest.h>

namespace unisono::host {
namespace {

// Cores among which a copy of a writer and one of a reader take so long, through the cache and around it.
struct Cores {
  double through, around;
};
constexpr Cores kNear{1, 2}, kFar{5, 2};

// Sends pieces between such cores. Returns how many went around.
int send(ChunkWay& way, std::uint32_t& piece, const Cores& cores, int pieces) {
  int went = 0;
  for (int i = 0; i < pieces; ++i) {
    if (!ChunkWay::timed(++piece)) {
      went += way.around();
      continue;
    }
    const bool around = way.begin(piece);
    const double time = around ? cores.around : cores.through;
    way.wrote(time / 2);
    way.learn({piece, static_cast<float>(time / 2)});
    went += around;
  }
  return went;
}

TEST(ChunkWay, StaysWhereItIsTheFasterOneAndSeldomTriesTheOther) {
  ChunkWay through(false), around(true);
  std::uint32_t piece = 0;
  EXPECT_LE(send(through, piece, kNear, 5120), 11);
  EXPECT_GE(send(around, piece, kFar, 5120), 5120 - 11);
}

TEST(ChunkWay, ChangesWhereCoresHaveMoved) {
  ChunkWay way(false);
  std::uint32_t piece = 0;
  send(way, piece, kNear, 1000);
  EXPECT_FALSE(way.around());
  send(way, piece, kFar, 200);
  EXPECT_TRUE(way.around());
  send(way, piece, kNear, 2000);
  EXPECT_FALSE(way.around());
}

// A try replaces what was known of the other way before the cores moved.
TEST(ChunkWay, OneTryIsEnough) {
  ChunkWay way(false);
  std::uint32_t piece = 0;
  send(way, piece, {9, 2}, 200);
  EXPECT_TRUE(way.around());
  send(way, piece, {2.5, 2}, 64 * 8);
  EXPECT_FALSE(way.around());
}

TEST(ChunkWay, LeavesABeginThatWasWrongSoon) {
  for (const bool around : {false, true}) {
    ChunkWay way(around);
    std::uint32_t piece = 0;
    send(way, piece, around ? kNear : kFar, 24);
    EXPECT_EQ(way.around(), !around);
  }
}

TEST(ChunkWay, KeepsToTheCacheWhereAroundPaysLittle) {
  ChunkWay way(false);
  std::uint32_t piece = 0;
  EXPECT_LE(send(way, piece, {2.8, 2}, 5120), 11);
}

TEST(ChunkWay, OneCopyThatLostItsCoreChangesNothing) {
  ChunkWay way(false);
  std::uint32_t piece = 0;
  send(way, piece, kNear, 1000);
  send(way, piece, {1000, 2}, 8);
  EXPECT_FALSE(way.around());
}

TEST(ChunkWay, TimesOfOtherPiecesDoNotCount) {
  ChunkWay way(false);
  std::uint32_t piece = 0;
  send(way, piece, kNear, 1000);
  for (std::uint32_t other = 1001; other < 2000; ++other) way.learn({other, 50});
  EXPECT_FALSE(way.around());
}

}  // namespace
}  // namespace unisono::host
