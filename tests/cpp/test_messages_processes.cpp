// Messages with tags between two processes.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "messages.hpp"
#include "piped.hpp"
#include "processes.hpp"
#include "ranks.hpp"

namespace unisono::test {
namespace {

// Memory in huge pages, if the machine gives such.
class Huge {
 public:
  explicit Huge(std::size_t bytes) : all_(bytes + kPage) {
    at = all_.data() + (kPage - reinterpret_cast<std::uintptr_t>(all_.data()) % kPage) % kPage;
    ::madvise(at, bytes, MADV_HUGEPAGE);
  }
  std::uint8_t* at;

 private:
  static constexpr std::size_t kPage = std::size_t{2} << 20;
  struct Raw {
    explicit Raw(std::size_t bytes)
        : bytes_(bytes),
          at_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
    Raw(const Raw&) = delete;
    ~Raw() { ::munmap(at_, bytes_); }
    std::uint8_t* data() const { return static_cast<std::uint8_t*>(at_); }
    const std::size_t bytes_;
    void* const at_;
  } all_;
};

// Messages go both ways, from memory that the kernel copies well and from memory that it does not.
TEST(Message, LargeOnesPassBetweenProcesses) {
  if (UNISONO_SANITIZED) GTEST_SKIP() << "the thread sanitizer does not let a process with threads fork";
  Pipe to_child, to_parent;
  const auto rank = [&](int me) {
    Communicator comm(
        std::make_shared<Piped>(me, me == 0 ? to_parent : to_child, me == 0 ? to_child : to_parent),
        {.timeout_s = 120});
    const int other = 1 - me;
    constexpr std::size_t kBytes = (std::size_t{5} << 20) + 13;
    Huge huge(kBytes);
    bool right = true;
    for (int i = 0; i < 12; ++i) {
      const std::size_t bytes = i < 4 ? 70001 : kBytes;
      const Bytes x = content(me, other, i, bytes);
      std::copy(x.begin(), x.end(), huge.at);
      Call call = from(x);
      if (i % 2 == 0) call.in = huge.at;
      Bytes got(bytes);
      const Work send = comm.begin(Collective::send, call, other, -1, 3);
      right = right && comm.recv(into(got), i % 3 == 0 ? Communicator::kAnySource : other, 3).bytes == bytes;
      send.wait();
      right = right && got == content(other, me, i, bytes);
    }
    comm.barrier();
    return right;
  };
  Child child([&] { return rank(1) ? 0 : 1; });
  EXPECT_TRUE(rank(0));
  EXPECT_EQ(child.wait(), 0);
}

// A rank dies while a large message to it, or of it, is under way.
TEST(Message, ADeadEndOfALargeOneIsNamed) {
  if (UNISONO_SANITIZED) GTEST_SKIP() << "the thread sanitizer does not let a process with threads fork";
  for (const bool sends : {true, false}) {
    constexpr std::size_t kBytes = std::size_t{4} << 20;
    Pipe to_child, to_parent;
    Child child([&] {
      Communicator comm(std::make_shared<Piped>(1, to_child, to_parent), {.timeout_s = 120});
      Huge x(kBytes);
      std::fill_n(x.at, kBytes, std::uint8_t{7});
      Work work;
      if (sends)
        work = comm.begin(Collective::send, {.in = x.at, .count = kBytes, .dtype = DType::u8}, 0, -1, 3);
      Bytes y(1);
      comm.send(from(y), 0, 1);
      comm.recv(into(y), 0, 1);
      ::raise(SIGKILL);
      return 0;
    });
    Communicator comm(std::make_shared<Piped>(0, to_parent, to_child), {.timeout_s = 120});
    Bytes y(1), all(kBytes);
    comm.recv(into(y), 1, 1);
    comm.send(from(y), 1, 1);
    child.wait();
    const std::string text = text_of<PeerLostError>([&] {
      if (sends) comm.recv(into(all), 1, 3);
      else comm.begin(Collective::send, from(all), 1, -1, 3).wait();
    });
    EXPECT_TRUE(has(text, "rank 1 (process " + std::to_string(child.pid()) + ") has died")) << text;
  }
}

// A sender dies in the middle of a large message.
TEST(Message, ADeadRankIsNamed) {
  if (UNISONO_SANITIZED) GTEST_SKIP() << "the thread sanitizer does not let a process with threads fork";
  Pipe to_child, to_parent;
  Child child([&] {
    Communicator comm(std::make_shared<Piped>(1, to_child, to_parent), {.timeout_s = 120});
    const Bytes x(1000000);
    Bytes y(2);
    comm.begin(Collective::send, from(x), 0, -1, 3);
    comm.recv(into(y), 0, 1);
    ::raise(SIGKILL);
    return 0;
  });
  Communicator comm(std::make_shared<Piped>(0, to_parent, to_child), {.timeout_s = 120});
  Bytes x(2), y(1000000);
  const Work work = comm.begin(Collective::recv, into(y), -1, 1, 4);
  comm.send(from(x), 1, 1);
  const std::string text = text_of<PeerLostError>([&] { work.wait(); });
  EXPECT_TRUE(has(text, "rank 1 (process " + std::to_string(child.pid()) + ") has died")) << text;
  EXPECT_EQ(text_of<PeerLostError>([&] { comm.recv(into(y), 1, 3); }), text);
}

}  // namespace
}  // namespace unisono::test
