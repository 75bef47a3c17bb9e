// Shared memory between processes: a handle opens it, and a wrong handle does not.
#include "host/segment.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "processes.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

using test::Child;
using test::Pipe;
constexpr std::size_t kBytes = 100000;

TEST(Segment, IsZeroedAndWritable) {
  const auto segment = Segment::create(kBytes);
  ASSERT_EQ(segment->bytes(), kBytes);
  EXPECT_TRUE(
      std::all_of(segment->data(), segment->data() + kBytes, [](std::byte b) { return b == std::byte{0}; }));
  std::fill_n(segment->data(), kBytes, std::byte{1});
}

TEST(Segment, IsTheSameMemoryInItsOwnProcess) {
  const auto segment = Segment::create(kBytes);
  EXPECT_EQ(Segment::open(segment->handle(), kBytes)->data(), segment->data());
}

TEST(Segment, OfThisProcessIsGoneWithItsLastOwner) {
  auto segment = Segment::create(kBytes);
  const Segment::Handle handle = segment->handle();
  segment.reset();
  EXPECT_THROW(Segment::open(handle, kBytes), ResourceError);
}

TEST(Segment, OfThisProcessIsFoundByItsMarkAndSize) {
  const auto segment = Segment::create(kBytes);
  Segment::Handle handle = segment->handle();
  handle.nonce ^= 2;
  EXPECT_THROW(Segment::open(handle, kBytes), ResourceError);
  handle = segment->handle();
  EXPECT_THROW(Segment::open(handle, kBytes + 1), ResourceError);
  handle.bytes = kBytes + 1;
  EXPECT_THROW(Segment::open(handle, kBytes + 1), ResourceError);
}

TEST(Segment, CannotBeLargerThanTheMachine) {
  for (const std::size_t bytes :
       {std::numeric_limits<std::size_t>::max(), std::numeric_limits<std::size_t>::max() - 4096,
        std::size_t{1} << 63, std::size_t{1} << 50})
    EXPECT_THROW(Segment::create(bytes), ResourceError) << bytes;
}

TEST(Segment, SaysThatItIsReleased) {
  const auto segment = Segment::create(kBytes);
  EXPECT_FALSE(segment->released());
  segment->release();
  EXPECT_TRUE(Segment::open(segment->handle(), kBytes)->released());
}

// The child has only a handle from a pipe. Each process sees the other's writes.
TEST(Segment, IsSharedWithAnotherProcess) {
  Pipe to_child, to_parent;
  Child child([&] {
    const auto segment = Segment::open(to_child.receive<Segment::Handle>(), kBytes);
    if (segment->data()[kBytes - 1] != std::byte{7}) return 1;
    segment->data()[0] = std::byte{9};
    to_parent.send(1);
    to_child.receive<int>();
    return segment->data()[1] == std::byte{8} ? 0 : 2;
  });
  const auto segment = Segment::create(kBytes);
  segment->data()[kBytes - 1] = std::byte{7};
  to_child.send(segment->handle());
  to_parent.receive<int>();
  EXPECT_EQ(segment->data()[0], std::byte{9});
  segment->data()[1] = std::byte{8};
  to_child.send(1);
  EXPECT_EQ(child.wait(), 0);
}

TEST(Segment, OutlivesTheProcessThatCreatedIt) {
  Pipe to_child, to_parent;
  Child child([&] {
    const auto segment = Segment::create(kBytes);
    segment->data()[5] = std::byte{6};
    to_parent.send(segment->handle());
    return to_child.receive<int>();
  });
  const auto handle = to_parent.receive<Segment::Handle>();
  const auto segment = Segment::open(handle, kBytes);
  to_child.send(0);
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(segment->data()[5], std::byte{6});
  EXPECT_THROW(Segment::open(handle, kBytes), ResourceError);  // the process is gone
}

TEST(Segment, OpensNothingThatItsHandleDoesNotDescribe) {
  Pipe to_child;
  Child child([&] {
    const auto handle = to_child.receive<Segment::Handle>();
    auto refused = [](const Segment::Handle& wrong, std::size_t bytes) {
      try {
        Segment::open(wrong, bytes);
      } catch (const ResourceError&) { return true; }
      return false;
    };
    Segment::Handle wrong = handle;
    wrong.nonce ^= 1;
    if (!refused(wrong, kBytes)) return 1;
    wrong = handle, wrong.fd = 1000000;  // no such file
    if (!refused(wrong, kBytes)) return 2;
    wrong = handle, wrong.fd = to_child.receive<int>();  // a pipe
    if (!refused(wrong, kBytes)) return 3;
    wrong.fd = to_child.receive<int>();  // a device
    if (!refused(wrong, kBytes)) return 4;
    wrong = handle, wrong.fd = -1;
    if (!refused(wrong, kBytes)) return 5;
    wrong = handle, wrong.pid = 0x7ffffffe;  // no such process
    if (!refused(wrong, kBytes)) return 6;
    wrong = handle, wrong.bytes = kBytes * 2;  // not the length of this rank's
    if (!refused(wrong, kBytes)) return 7;
    if (!refused(wrong, kBytes * 2)) return 8;  // not the length of the file
    Segment::open(handle, kBytes);
    return 0;
  });
  const auto segment = Segment::create(kBytes);
  to_child.send(segment->handle());
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const int device = ::open("/dev/null", O_RDWR);
  to_child.send(pipe[0]);
  to_child.send(device);
  EXPECT_EQ(child.wait(), 0);
  for (const int fd : {pipe[0], pipe[1], device}) ::close(fd);
}

}  // namespace
}  // namespace unisono
