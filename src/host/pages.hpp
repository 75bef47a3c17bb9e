// Tells which pages memory of this process has: the kernel's copies between processes cost by the page.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace unisono::host {

class Pages {
 public:
  // Opens this process's table. A forked child needs one of its own.
  Pages();
  ~Pages();
  Pages(const Pages&) = delete;

  // Whether the kernel tells: from Linux 6.7 on, where there is /proc.
  bool known() const { return file_ >= 0; }
  // Returns whether memory lies in huge pages, judged by its middle. Where the kernel does not tell: whether
  // it is as large as what allocators ask huge pages for. To ask the kernel takes 1 to 2 us, so that an
  // answer serves kAsksAgain more questions about the same page. From any thread.
  bool huge(const void* at, std::size_t bytes) const;
  static constexpr std::uint64_t kAsksAgain = 31;

 private:
  struct Answer {
    std::uint64_t page : 52 = 0, serves : 11 = 0, huge : 1 = 0;
  };
  static constexpr std::size_t kAnswers = 64;

  int file_;
  mutable std::array<std::atomic<Answer>, kAnswers> answers_{};  // by page
};

}  // namespace unisono::host
