// Far::move on memory of another process: a fork, whose own copy of `kept` lies at the test's address.
#include "host/far.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <stdexcept>
#include <vector>

#include "processes.hpp"
#include "reference.hpp"

namespace unisono::host {
namespace {

using test::Bytes;
using test::Child;
using test::Pipe;

constexpr int kFar = 1;
constexpr std::size_t kRoom = 400000;

// Each process fills its own copy of `kept` from a seed. The child compares its copy with the expected bytes.
class FarMoves : public testing::Test {
 protected:
  Bytes kept = test::random_bytes(kRoom, 1);  // the parent's; the child's begins as `theirs`
  Pipe ready, verdict;
  Bytes theirs = test::random_bytes(kRoom, 2);
  Kernels const& kernels = host::kernels();
  Reduce sum = kernels.reduce[static_cast<int>(DType::i32)][static_cast<int>(Op::sum)];

  // Runs `moves` beside a child that does nothing. Expects `expected` in the child's copy in the end.
  void with_child(const Bytes& expected, const std::function<void(Far&)>& moves) {
    Child child([&] {
      std::copy(theirs.begin(), theirs.end(), kept.begin());
      ready.send(1);
      verdict.receive<int>();
      return kept == expected ? 0 : 1;
    });
    ready.receive<int>();
    int probe = 0;
    const bool permitted = Far::try_copy(Way::read, child.pid(), reinterpret_cast<std::uint64_t>(kept.data()),
                                         &probe, sizeof probe);
    Far far({::getpid(), child.pid()}, [](int rank, int error) {
      throw std::runtime_error("rank " + std::to_string(rank) + " unreachable: " + std::to_string(error));
    });
    if (permitted) moves(far);
    verdict.send(1);
    if (!permitted) child.wait();
    if (!permitted) GTEST_SKIP() << "the kernel forbids process_vm_readv here";
    EXPECT_EQ(child.wait(), 0);
  }
  byte* at(std::size_t offset) {
    return far_address(kFar, reinterpret_cast<std::uint64_t>(kept.data() + offset));
  }
  Bytes summed(const std::vector<const byte*>& srcs, std::size_t bytes) {
    return test::reduced(DType::i32, Op::sum, srcs, bytes / 4);
  }
};

TEST_F(FarMoves, ATaggedAddressIsFarAndCanBeOffset) {
  for (const int rank : {0, 1, 1023}) {
    byte* far = far_address(rank, reinterpret_cast<std::uint64_t>(kept.data()));
    EXPECT_TRUE(is_far(far));
    EXPECT_EQ(far + 100, far_address(rank, reinterpret_cast<std::uint64_t>(kept.data() + 100)));
  }
  EXPECT_FALSE(is_far(kept.data()));
}

TEST_F(FarMoves, CopyIn) {
  with_child(theirs, [&](Far& far) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{4097}, kRoom - 7}) {
      Bytes got(bytes + 1);
      const Dst to{got.data()};
      const byte* from = at(7);
      far.move(kernels, nullptr, &to, 1, &from, 1, bytes);
      EXPECT_EQ(std::memcmp(got.data(), theirs.data() + 7, bytes), 0);
      EXPECT_EQ(got[bytes], std::byte{0});
    }
  });
}

TEST_F(FarMoves, CopyOut) {
  Bytes expected = theirs;
  std::copy_n(kept.begin() + 3, 300001, expected.begin() + 50);
  with_child(expected, [&](Far& far) {
    const Dst to{at(50)};
    const byte* from = kept.data() + 3;
    far.move(kernels, nullptr, &to, 1, &from, 1, 300001);
  });
}

// At places in a page where the kernel's string moves crawl, which go another way.
TEST_F(FarMoves, CopyBetweenNeighbouringPlacesInAPage) {
  constexpr std::size_t kPage = 4096, kBytes = 200001;
  const Bytes mine = test::random_bytes(kBytes, 3);
  const auto address = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at); };
  const std::size_t first = (address(mine.data()) + 16 - address(kept.data())) % kPage;  // 16 bytes ahead
  Bytes expected = theirs;
  std::copy(mine.begin(), mine.end(), expected.begin() + static_cast<long>(first));
  with_child(expected, [&](Far& far) {
    ASSERT_TRUE(string_moves_crawl(kept.data() + first, address(mine.data())));
    const Dst out{at(first)};
    const byte* from = mine.data();
    far.move(kernels, nullptr, &out, 1, &from, 1, kBytes);
    for (const std::size_t bytes : {std::size_t{1000}, std::size_t{1025}, kBytes}) {
      Bytes got(bytes + 2 * kPage);
      const std::size_t begin = (address(kept.data()) + 31 - address(got.data())) % kPage;
      const Dst to{got.data() + begin};
      ASSERT_TRUE(string_moves_crawl(to.at, address(kept.data())));
      const byte* source = at(0);
      far.move(kernels, nullptr, &to, 1, &source, 1, bytes);
      EXPECT_EQ(std::memcmp(to.at, expected.data(), bytes), 0);
      EXPECT_EQ(to.at[bytes], std::byte{0});
    }
  });
}

TEST_F(FarMoves, CopyFromFarToFar) {
  Bytes expected = theirs;
  std::copy_n(theirs.begin(), 150000, expected.begin() + 200000);
  with_child(expected, [&](Far& far) {
    const Dst to{at(200000)};
    const byte* from = at(0);
    far.move(kernels, nullptr, &to, 1, &from, 1, 150000);
  });
}

TEST_F(FarMoves, CopyToFarAndNearAtOnce) {
  Bytes expected = theirs;
  std::copy_n(kept.begin(), 199999, expected.begin() + 200001);
  with_child(expected, [&](Far& far) {
    Bytes one(199999), two(199999);
    const Dst to[] = {{one.data(), true}, {at(200001)}, {two.data()}};
    const byte* from = kept.data();
    far.move(kernels, nullptr, to, 3, &from, 1, 199999);
    EXPECT_EQ(std::memcmp(one.data(), kept.data(), 199999), 0);
    EXPECT_EQ(one, two);
  });
}

TEST_F(FarMoves, ReduceFarAndNearSources) {
  with_child(theirs, [&](Far& far) {
    const std::size_t bytes = 262148;  // two bounces and an element
    Bytes got(bytes);
    const Dst to{got.data()};
    const byte* srcs[] = {kept.data() + 8, at(16), at(100000), kept.data() + 100};
    far.move(kernels, sum, &to, 1, srcs, 4, bytes);
    EXPECT_EQ(
        got, summed({kept.data() + 8, theirs.data() + 16, theirs.data() + 100000, kept.data() + 100}, bytes));
  });
}

TEST_F(FarMoves, ReduceToFarAndNear) {
  const std::size_t bytes = 262148;
  const Bytes sums = summed({kept.data(), theirs.data() + 64}, bytes);
  Bytes expected = theirs;
  std::copy(sums.begin(), sums.end(), expected.begin() + 64);  // in place of the far source
  with_child(expected, [&](Far& far) {
    const byte* srcs[] = {kept.data(), at(64)};
    const Dst to[] = {{kept.data()}, {at(64)}};  // in place of both sources
    far.move(kernels, sum, to, 2, srcs, 2, bytes);
    EXPECT_EQ(std::memcmp(kept.data(), sums.data(), bytes), 0);
  });
}

// A far source is copied to where the sum goes, except if a near one lies there, or the sum goes around the
// cache.
TEST_F(FarMoves, ReduceToNearOfTwo) {
  const std::size_t bytes = 262148;
  const Bytes sums = summed({kept.data(), theirs.data() + 64}, bytes);
  with_child(theirs, [&](Far& far) {
    const Bytes mine = kept;
    for (const bool far_first : {false, true})
      for (const bool stream : {false, true}) {
        Bytes got(bytes + 1), other(bytes + 1);
        const Dst to[] = {{got.data(), stream}, {other.data(), stream}};
        const byte* srcs[] = {far_first ? at(64) : kept.data(), far_first ? kept.data() : at(64)};
        far.move(kernels, sum, to, 2, srcs, 2, bytes);
        EXPECT_EQ(std::memcmp(got.data(), sums.data(), bytes), 0);
        EXPECT_EQ(got, other);
        EXPECT_EQ(kept, mine);
        EXPECT_EQ(got[bytes], std::byte{0});
      }
    const Dst to{kept.data()};
    const byte* srcs[] = {at(64), kept.data()};
    far.move(kernels, sum, &to, 1, srcs, 2, bytes);
    EXPECT_EQ(std::memcmp(kept.data(), sums.data(), bytes), 0);
  });
}

TEST_F(FarMoves, ReduceToFarOnly) {
  const std::size_t bytes = 180000;
  const Bytes sums = summed({kept.data(), kept.data() + 4, theirs.data()}, bytes);
  Bytes expected = theirs;
  std::copy(sums.begin(), sums.end(), expected.begin() + 200000);
  with_child(expected, [&](Far& far) {
    const byte* srcs[] = {kept.data(), kept.data() + 4, at(0)};
    const Dst to{at(200000)};
    far.move(kernels, sum, &to, 1, srcs, 3, bytes);
  });
}

struct Unreachable {
  int rank, error;
};
Unreachable unreachable_of(int pid, const byte* from) {
  Far far({::getpid(), pid}, [](int rank, int error) { throw Unreachable{rank, error}; });
  Bytes got(100);
  const Dst to{got.data()};
  try {
    far.move(host::kernels(), nullptr, &to, 1, &from, 1, got.size());
  } catch (const Unreachable& error) { return error; }
  return {-1, 0};
}

TEST_F(FarMoves, ADeadProcessIsUnreachable) {
  Child child([] { return 0; });
  EXPECT_EQ(child.wait(), 0);
  const Unreachable what = unreachable_of(child.pid(), at(0));
  EXPECT_EQ(what.rank, kFar);
  EXPECT_TRUE(what.error == ESRCH || what.error == EPERM || what.error == ENOSYS) << what.error;
}

TEST_F(FarMoves, MemoryThatIsNotThereIsUnreachable) {
  const Unreachable what = unreachable_of(::getpid(), far_address(kFar, 4096));
  EXPECT_EQ(what.rank, kFar);
  EXPECT_TRUE(what.error == EFAULT || what.error == EPERM || what.error == ENOSYS) << what.error;
}

// An address that a peer has made up leads to no other rank.
TEST(FarAddress, KeepsItsRank) {
  const byte* const far = far_address(3, ~std::uint64_t{0});
  EXPECT_EQ(rank_of(far), 3);
  EXPECT_EQ(address_of(far), kAddressBits);
}

}  // namespace
}  // namespace unisono::host
