#include "fabric/shm_file.hpp"

#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string_view>

#include "fabric/library.hpp"
#include "unisono/error.hpp"

namespace unisono::fabric {
namespace {

constexpr std::string_view kScheme = "fi_shm://", kOurs = "fi_shm://unisono-";

std::string fresh_address() {
  std::random_device random;
  char nonce[17];
  std::snprintf(nonce, sizeof nonce, "%08" PRIx32 "%08" PRIx32, random(), random());
  return std::string(kOurs) + nonce;
}

}  // namespace

Info with_own_file(const Info& nic) {
  const auto* const address = static_cast<const char*>(nic->src_addr);
  if (nic->addr_format != FI_ADDR_STR || !address || !std::string_view(address).starts_with(kScheme))
    return nic;
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
  if (!address.starts_with(kOurs)) return;
  const char* const name = address.c_str() + kScheme.size();
  if (!std::strchr(name, '/')) ::shm_unlink(name);
}

}  // namespace unisono::fabric
