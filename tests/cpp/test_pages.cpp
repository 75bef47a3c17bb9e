// Pages of memory of this process, of both kinds.
#include "host/pages.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <fstream>
#include <string>

#include "base/bytes.hpp"

namespace unisono::host {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Anonymous memory with at least `bytes` bytes that begin at a border of huge pages.
class Mapping {
 public:
  explicit Mapping(std::size_t bytes)
      : bytes_(bytes + kHugePage),
        all_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Mapping() { ::munmap(all_, bytes_); }
  Mapping(const Mapping&) = delete;
  char* begin() const {
    return reinterpret_cast<char*>(round_up(reinterpret_cast<std::size_t>(all_), kHugePage));
  }

 private:
  std::size_t bytes_;
  void* all_;
};

// Returns the huge pages of this process, in KiB, as the kernel counts them.
long counted() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string word; rollup >> word;)
    if (long kib = 0; word == "AnonHugePages:" && rollup >> kib) return kib;
  return -1;
}

TEST(Pages, AreHugeOrNot) {
  const Pages pages;
  if (!pages.known()) GTEST_SKIP() << "the kernel does not tell of pages here";
  const Mapping small(2 * kHugePage), large(2 * kHugePage);
  ::madvise(small.begin(), 2 * kHugePage, MADV_NOHUGEPAGE);
  std::memset(small.begin(), 1, 2 * kHugePage);
  const long before = counted();
  ::madvise(large.begin(), 2 * kHugePage, MADV_HUGEPAGE);
  std::memset(large.begin(), 1, 2 * kHugePage);
  if (before < 0 || counted() - before < 4096) GTEST_SKIP() << "the kernel has no huge pages to give here";
  EXPECT_TRUE(pages.huge(large.begin(), 2 * kHugePage));
  EXPECT_TRUE(pages.huge(large.begin() + 12345, 4096));
  EXPECT_FALSE(pages.huge(small.begin() + 12345, 4096));
}

TEST(Pages, OfNothing) {
  const Pages pages;
  EXPECT_FALSE(pages.huge(nullptr, 0));
  EXPECT_FALSE(pages.huge(&pages, sizeof pages));
}

}  // namespace
}  // namespace unisono::host
