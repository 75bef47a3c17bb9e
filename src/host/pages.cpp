#include "host/pages.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdint>
#include <optional>

namespace unisono::host {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::size_t kUsuallyHuge = std::size_t{4} << 20;  // numpy asks for huge pages from here on

// The ioctl PAGEMAP_SCAN (Documentation/admin-guide/mm/pagemap.rst of the kernel), which older headers lack.
struct Region {
  std::uint64_t start, end, categories;
};
struct Scan {
  std::uint64_t size, flags, start, end, walk_end, regions, most_regions, most_pages, inverted, all_of,
      any_of, told;
};
constexpr std::uint64_t kIsHuge = 1 << 6;

// Returns whether a page is part of a huge one. None: the kernel does not tell.
std::optional<bool> is_huge(int file, std::uint64_t page) {
  Region region{};
  const Scan scan{.size = sizeof scan,
                  .flags = 0,
                  .start = page,
                  .end = page + kPageBytes,
                  .walk_end = 0,
                  .regions = reinterpret_cast<std::uint64_t>(&region),
                  .most_regions = 1,
                  .most_pages = 0,
                  .inverted = 0,
                  .all_of = kIsHuge,
                  .any_of = 0,
                  .told = kIsHuge};
  const int found = ::ioctl(file, _IOWR('f', 16, Scan), &scan);
  return found < 0 ? std::nullopt : std::optional(found > 0);
}

}  // namespace

Pages::Pages() : file_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {
  if (file_ < 0 || is_huge(file_, 0)) return;
  ::close(file_);
  file_ = -1;
}

Pages::~Pages() {
  if (file_ >= 0) ::close(file_);
}

bool Pages::huge(const void* at, std::size_t bytes) const {
  if (!known()) return bytes >= kUsuallyHuge;
  const std::uint64_t page = (reinterpret_cast<std::uint64_t>(at) + bytes / 2) / kPageBytes;
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;  // spreads pages of buffers that lie in a row
  std::atomic<Answer>& kept = answers_[page * kGolden >> 32 & (kAnswers - 1)];
  Answer answer = kept.load(std::memory_order_relaxed);
  if (answer.page == page && answer.serves > 0) {
    --answer.serves;
  } else {
    const auto told = is_huge(file_, page * kPageBytes);
    if (!told) return bytes >= kUsuallyHuge;
    answer = {.page = page, .serves = kAsksAgain, .huge = *told};
  }
  kept.store(answer, std::memory_order_relaxed);
  return answer.huge;
}

}  // namespace unisono::host
