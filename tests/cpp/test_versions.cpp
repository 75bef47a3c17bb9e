// Programs with headers of another version. Compiled twice: the headers' minor or patch number differs from
// the library's (CMakeLists.txt). Each program runs the case of its name.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "unisono/communicator.hpp"

namespace {

void make_communicator() {
  const auto bootstraps = unisono::thread_bootstraps(1, std::chrono::seconds(30));
  unisono::Communicator comm(bootstraps[0], {});
  comm.barrier();
}

TEST(Versions, OtherMinorIsOneError) {
  try {
    make_communicator();
    FAIL() << "headers of another version were accepted";
  } catch (const unisono::UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("compiled with the headers of Unisono " OTHER_VERSION ","), std::string::npos)
        << text;
    EXPECT_NE(text.find("loaded the library " LIBRARY_VERSION ":"), std::string::npos) << text;
  }
}

TEST(Versions, OtherPatchIsAccepted) {
  ASSERT_NE(unisono::kHeaderVersion, unisono::library_version());
  make_communicator();
}

}  // namespace
