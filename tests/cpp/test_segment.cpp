// Shared memory between processes: a handle opens it, and a wrong handle does not.
#include "host/segment.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <limits>

#include "processes.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

using test::Child;
using test::Pipe;
constexpr std::size_t kBytes = 100000;
constexpr std::size_t kPart = 8192, kParts = 64;

// Returns the bytes of memory that a segment of this process has taken.
std::size_t taken(const Segment& segment) {
  struct stat found{};
  ::fstat(segment.handle().fd, &found);
  return static_cast<std::size_t>(found.st_blocks) * 512;
}

// Has the kernel answer as those before 5.14, which cannot fill.
void refuse_to_fill() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_POPULATE_WRITE, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(code), code};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    throw std::runtime_error("no filter");
}

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

TEST(Segment, TakesMemoryForWhatIsFilled) {
  const auto segment = Segment::create(kParts * kPart, kPart);
  const std::size_t at_first = taken(*segment);
  EXPECT_LE(at_first, 2 * kPart);
  segment->data()[5 * kPart] = std::byte{7};
  for (const std::size_t part : {5, 9, 5}) segment->fill(segment->data() + part * kPart, kPart);
  EXPECT_EQ(taken(*segment), at_first + 2 * kPart);
  EXPECT_EQ(segment->data()[5 * kPart], std::byte{7});
}

// The peer fills what it has only mapped, on a kernel of today and on one that touches page by page.
TEST(Segment, IsFilledByAnotherProcess) {
  const auto segment = Segment::create(kParts * kPart, kPart);
  const std::size_t at_first = taken(*segment);
  for (const std::size_t old : {0, 1}) {
    Child child([&] {
      if (old == 1) refuse_to_fill();
      const auto handle = segment->handle();
      const auto mapped =
          Segment::open({::getppid(), handle.fd, handle.bytes, handle.nonce}, kParts * kPart, kPart);
      mapped->data()[kPart * (2 + old)] = std::byte{3};
      mapped->fill(mapped->data() + kPart * (2 + old), kPart);
      return mapped->data()[kPart * (2 + old)] == std::byte{3} ? 0 : 1;
    });
    EXPECT_EQ(child.wait(), 0) << old;
    EXPECT_EQ(taken(*segment), at_first + (1 + old) * kPart);
  }
}

// A page that cannot be had is an error, where an access would be a signal.
TEST(Segment, SaysThatItCannotBeFilled) {
  const auto segment = Segment::create(kParts * kPart, kPart);
  ASSERT_EQ(::ftruncate(segment->handle().fd, 4 * kPart), 0);
  EXPECT_NO_THROW(segment->fill(segment->data() + kPart, kPart));
  EXPECT_THROW(segment->fill(segment->data() + 9 * kPart, kPart), ResourceError);
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
