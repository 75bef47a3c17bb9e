// Sizes of caches, as the kernel's files tell them.
#include "host/caches.hpp"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace unisono::host {
namespace {

class Caches : public testing::Test {
 protected:
  Caches() {
    std::string name = std::filesystem::temp_directory_path() / "unisono-caches-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~Caches() override { std::filesystem::remove_all(folder_); }
  void add(int index, int level, const std::string& size) const {
    const auto cache = folder_ / ("index" + std::to_string(index));
    std::filesystem::create_directory(cache);
    std::ofstream(cache / "level") << level << '\n';
    std::ofstream(cache / "size") << size << '\n';
  }
  std::size_t bytes(int level) const { return cache_bytes(level, folder_); }

 private:
  std::filesystem::path folder_;
};

TEST_F(Caches, AreThoseOfTheKernel) {
  add(0, 1, "48K");
  add(1, 1, "32K");
  add(2, 2, "1024K");
  add(3, 3, "32768K");
  EXPECT_EQ(bytes(2), std::size_t{1} << 20);
  EXPECT_EQ(bytes(3), std::size_t{32} << 20);
}

TEST_F(Caches, AreThoseOfTheLibraryIfTheKernelTellsNone) {
  const std::size_t elsewhere[] = {bytes(2), bytes(3)};
  add(0, 2, "much");
  add(1, 1, "32K");
  EXPECT_EQ(bytes(2), elsewhere[0]);
  EXPECT_EQ(bytes(3), elsewhere[1]);
  EXPECT_EQ(elsewhere[0], static_cast<std::size_t>(std::max(0L, ::sysconf(_SC_LEVEL2_CACHE_SIZE))));
}

}  // namespace
}  // namespace unisono::host
