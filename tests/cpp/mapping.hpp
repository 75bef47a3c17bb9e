// Memory whose kind of pages a test chooses.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <fstream>
#include <new>
#include <string>

#include "base/bytes.hpp"

namespace unisono::test {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Anonymous memory of at least `bytes` bytes from a border of huge pages on, filled with ones.
class Mapping {
 public:
  Mapping(std::size_t bytes, bool huge)
      : bytes_(round_up(bytes, kHugePage) + kHugePage),
        all_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (all_ == MAP_FAILED) throw std::bad_alloc();
    ::madvise(all_, bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    std::memset(data(), 1, bytes_ - kHugePage);
  }
  ~Mapping() { ::munmap(all_, bytes_); }
  Mapping(const Mapping&) = delete;

  std::byte* data() const {
    return reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::size_t>(all_), kHugePage));
  }

 private:
  std::size_t bytes_;
  void* all_;
};

// Returns the huge pages of this process, in KiB, as the kernel counts them; -1: unknown.
inline long huge_kib() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string word; rollup >> word;)
    if (long kib = 0; word == "AnonHugePages:" && rollup >> kib) return kib;
  return -1;
}

}  // namespace unisono::test
