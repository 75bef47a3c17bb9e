// Support for tests over libfabric.
#pragma once

#include <string>

#include "unisono/communicator.hpp"
#include "unisono/error.hpp"

// Keeps the address sanitizer from reporting libfabric: its tcp keeps a copy of the provider's description
// for every connection (1.17; after the same calls, its shm leaves nothing). Weak: several files of a program
// have it.
#if defined(__SANITIZE_ADDRESS__)
extern "C" __attribute__((visibility("default"), weak)) const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric"; }
#endif

namespace unisono::test {

// Returns why ranks cannot meet over a provider here. Empty: they can.
inline std::string no_fabric(const std::string& provider) {
#if defined(__SANITIZE_THREAD__)
  return "the thread sanitizer does not see how libfabric orders the ranks' writes";
#endif
  try {
    fabric_provider(provider);
    return {};
  } catch (const Error& error) { return error.what(); }
}

}  // namespace unisono::test
