// Tells which pages memory of this process has: the kernel's copies between processes cost by the page.
#pragma once

#include <cstddef>

namespace unisono::host {

class Pages {
 public:
  // Opens this process's table. A forked child needs one of its own.
  Pages();
  ~Pages();
  Pages(const Pages&) = delete;

  // Whether the kernel tells: from Linux 6.7 on, where there is /proc.
  bool known() const { return file_ >= 0; }
  // Returns whether memory lies in huge pages, judged by its middle. Takes about a microsecond. Where the
  // kernel does not tell: whether it is as large as what allocators ask huge pages for. From any thread.
  bool huge(const void* at, std::size_t bytes) const;

 private:
  int file_;
};

}  // namespace unisono::host
