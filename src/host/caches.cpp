#include "host/caches.hpp"

#include <unistd.h>

#include <fstream>

namespace unisono::host {

std::size_t cache_bytes(int level, const std::string& kernel) {
  constexpr int kMostCaches = 16;
  for (int i = 0; i < kMostCaches; ++i) {
    const std::string cache = kernel + "/index" + std::to_string(i);
    int of_level = 0;
    std::size_t kib = 0;
    char unit = 0;
    std::ifstream(cache + "/level") >> of_level;
    if (of_level == level && std::ifstream(cache + "/size") >> kib >> unit && unit == 'K') return kib << 10;
  }
  const long bytes = ::sysconf(level == 2 ? _SC_LEVEL2_CACHE_SIZE : _SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
}

}  // namespace unisono::host
