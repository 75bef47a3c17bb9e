// Pages of memory of this process, of both kinds.
#include "host/pages.hpp"

#include <gtest/gtest.h>

#include "mapping.hpp"

namespace unisono::host {
namespace {

using test::kHugePage;

TEST(Pages, AreHugeOrNot) {
  const Pages pages;
  if (!pages.known()) GTEST_SKIP() << "the kernel does not tell of pages here";
  const test::Mapping small(2 * kHugePage, false);
  const long before = test::huge_kib();
  const test::Mapping large(2 * kHugePage, true);
  if (before < 0 || test::huge_kib() - before < 4096)
    GTEST_SKIP() << "the kernel has no huge pages to give here";
  EXPECT_TRUE(pages.huge(large.data(), 2 * kHugePage));
  EXPECT_TRUE(pages.huge(large.data() + 12345, 4096));
  EXPECT_FALSE(pages.huge(small.data() + 12345, 4096));
}

// A place may get other pages, for example when it is freed and taken again.
TEST(Pages, AreAskedForAgain) {
  const Pages pages;
  if (!pages.known()) GTEST_SKIP() << "the kernel does not tell of pages here";
  const long before = test::huge_kib();
  const test::Mapping memory(2 * kHugePage, true);
  if (before < 0 || test::huge_kib() - before < 4096)
    GTEST_SKIP() << "the kernel has no huge pages to give here";
  EXPECT_TRUE(pages.huge(memory.data(), 2 * kHugePage));
  ASSERT_EQ(::madvise(memory.data(), 2 * kHugePage, MADV_NOHUGEPAGE), 0);
  ASSERT_EQ(::madvise(memory.data(), 2 * kHugePage, MADV_DONTNEED), 0);
  std::memset(memory.data(), 1, 2 * kHugePage);
  for (std::uint64_t i = 0; i < Pages::kAsksAgain; ++i) pages.huge(memory.data(), 2 * kHugePage);
  EXPECT_FALSE(pages.huge(memory.data(), 2 * kHugePage));
  EXPECT_FALSE(pages.huge(memory.data() + kHugePage / 2, kHugePage / 2)) << "another place is asked for";
}

TEST(Pages, OfNothing) {
  const Pages pages;
  EXPECT_FALSE(pages.huge(nullptr, 0));
  EXPECT_FALSE(pages.huge(&pages, sizeof pages));
}

}  // namespace
}  // namespace unisono::host
