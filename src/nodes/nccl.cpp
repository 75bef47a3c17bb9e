#include "nodes/nccl.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "base/env.hpp"

namespace unisono::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";

// Returns where pip's package has the library if it lies beside the package that this code is part of.
std::string beside_this_package() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&library), &info) == 0 || !info.dli_fname) return {};
  const auto package = std::filesystem::path(info.dli_fname).parent_path();
  return (package.parent_path() / "nvidia" / "nccl" / "lib" / kName).string();
}

// NCCL's symbols stay its own: another copy, linked into a framework, must not take them.
void* open_library(std::string& why) {
  auto open = [&](const std::string& file) {
    void* const found = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!found) why = ::dlerror();
    return found;
  };
  if (const std::string& named = env().nccl; !named.empty()) return open(named);
  if (void* const found = open(kName)) return found;
  const std::string system = why;
  if (void* const found = open(beside_this_package())) return found;
  why = system;
  return nullptr;
}

template <class Function>
void find(void* from, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(from, name));
  if (!function) throw NcclError("this NCCL has no " + std::string(name) + ": install NCCL 2.19 or newer");
}

Library open() {
  std::string why;
  void* const from = open_library(why);
  if (!from)
    throw NcclError("no NCCL library can be loaded (" + why +
                    "): pip install nvidia-nccl-cu13, or name the file in UNISONO_NCCL");
  Library found{};
  find(from, "ncclGetUniqueId", found.get_unique_id);
  find(from, "ncclCommInitRank", found.comm_init_rank);
  find(from, "ncclCommAbort", found.comm_abort);
  find(from, "ncclCommGetAsyncError", found.comm_get_async_error);
  find(from, "ncclGroupStart", found.group_start);
  find(from, "ncclGroupEnd", found.group_end);
  find(from, "ncclSend", found.send);
  find(from, "ncclRecv", found.recv);
  find(from, "ncclGetErrorString", found.get_error_string);
  find(from, "ncclGetLastError", found.get_last_error);
  return found;
}

}  // namespace

const Library& library() {
  static const Library once = open();
  return once;
}

void check(int result, const char* name) {
  if (result == kSuccess) return;
  const char* const last = library().get_last_error(nullptr);
  std::string words = last ? last : "";
  while (!words.empty() && (words.back() == '\n' || words.back() == ' ')) words.pop_back();
  throw NcclError(std::string(name) + " failed: " + library().get_error_string(result) +
                  (words.empty() ? "" : " (" + words + ")"));
}

}  // namespace unisono::nccl
