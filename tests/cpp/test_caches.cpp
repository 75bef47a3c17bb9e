// Sizes of caches, as the kernel's files tell them.
#include "host/caches.hpp"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

namespace unisono::host {
namespace {

// A folder in which the kernel seems to tell of caches.
class Told {
 public:
  Told() { std::filesystem::create_directory(folder_); }
  ~Told() { std::filesystem::remove_all(folder_); }
  Told(const Told&) = delete;
  void add(int index, int level, const std::string& size) const {
    const auto cache = folder_ / ("index" + std::to_string(index));
    std::filesystem::create_directory(cache);
    std::ofstream(cache / "level") << level << '\n';
    std::ofstream(cache / "size") << size << '\n';
  }
  std::size_t bytes(int level) const { return cache_bytes(level, folder_); }

 private:
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("unisono-caches-" + std::to_string(::getpid()));
};

TEST(Caches, AreThoseOfTheKernel) {
  const Told told;
  told.add(0, 1, "48K");
  told.add(1, 1, "32K");
  told.add(2, 2, "1024K");
  told.add(3, 3, "32768K");
  EXPECT_EQ(told.bytes(2), std::size_t{1} << 20);
  EXPECT_EQ(told.bytes(3), std::size_t{32} << 20);
}

TEST(Caches, AreThoseOfTheLibraryIfTheKernelTellsNone) {
  const Told told;
  told.add(0, 2, "much");
  told.add(1, 1, "32K");
  const auto of_library = [](int name) { return static_cast<std::size_t>(std::max(0L, ::sysconf(name))); };
  EXPECT_EQ(told.bytes(2), of_library(_SC_LEVEL2_CACHE_SIZE));
  EXPECT_EQ(told.bytes(3), of_library(_SC_LEVEL3_CACHE_SIZE));
}

}  // namespace
}  // namespace unisono::host
