#include "fabric/shm_file.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string_view>
#include <utility>

#include "fabric/library.hpp"
#include "unisono/error.hpp"

namespace unisono::fabric {
namespace {

constexpr std::string_view kScheme = "fi_shm://", kOurs = "unisono-shm-";

std::string fresh_address() {
  std::random_device random;
  char nonce[17];
  std::snprintf(nonce, sizeof nonce, "%08" PRIx32 "%08" PRIx32, random(), random());
  return std::string(kScheme).append(kOurs) + nonce;
}

// Returns the name in /dev/shm of an endpoint's file; null: Unisono has not named the file.
const char* file_of(const std::string& address) {
  if (!address.starts_with(std::string(kScheme).append(kOurs))) return nullptr;
  const char* const name = address.c_str() + kScheme.size();
  return std::strchr(name, '/') ? nullptr : name;
}

bool lock(int file) { return file >= 0 && ::flock(file, LOCK_EX | LOCK_NB) == 0; }

}  // namespace

Info with_own_file(const Info& nic) {
  const auto* const address = static_cast<const char*>(nic->src_addr);
  if (nic->addr_format != FI_ADDR_STR || !address || !std::string_view(address).starts_with(kScheme))
    return nic;
  [[maybe_unused]] static const bool once = (remove_left_files(), true);
  const std::shared_ptr<fi_info> own(library().dupinfo(nic.get()), library().freeinfo);
  char* const fresh = ::strdup(fresh_address().c_str());
  if (!own || !fresh) {
    std::free(fresh);
    throw ResourceError("there is no memory to make an endpoint.");
  }
  std::free(own->src_addr);
  own->src_addr = fresh;
  own->src_addrlen = std::strlen(fresh) + 1;
  return own;
}

void remove_file(const std::string& address) noexcept {
  if (const char* const name = file_of(address)) ::shm_unlink(name);
}

ShmLock::~ShmLock() {
  if (file_ >= 0) ::close(file_);
}

bool ShmLock::take(const std::string& address) {
  const char* const name = file_of(address);
  if (!name) return true;
  file_ = ::shm_open(name, O_RDWR, 0);
  struct stat now{};
  if (lock(file_) && ::fstat(file_, &now) == 0 && now.st_nlink > 0) return true;
  if (file_ >= 0) ::close(std::exchange(file_, -1));
  return false;
}

void remove_left_files() noexcept {
  DIR* const all = ::opendir("/dev/shm");
  if (!all) return;
  while (const dirent* const one = ::readdir(all)) {
    if (!std::string_view(one->d_name).starts_with(kOurs)) continue;
    const int file = ::shm_open(one->d_name, O_RDWR, 0);
    if (lock(file)) ::shm_unlink(one->d_name);  // with the lock, so that no process takes the file now
    if (file >= 0) ::close(file);
  }
  ::closedir(all);
}

}  // namespace unisono::fabric
