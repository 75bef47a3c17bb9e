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

constexpr std::string_view kScheme = "fi_shm://", kOurs = "unisono-";

}  // namespace

Info with_own_file(const Info& nic) {
  const auto* const address = static_cast<const char*>(nic->src_addr);
  if (nic->addr_format != FI_ADDR_STR || !address || !std::string_view(address).starts_with(kScheme))
    return nic;
  std::random_device random;
  char name[64];
  std::snprintf(name, sizeof name, "%s%s%08" PRIx32 "%08" PRIx32, kScheme.data(), kOurs.data(), random(),
                random());
  const std::shared_ptr<fi_info> own(library().dupinfo(nic.get()), library().freeinfo);
  char* const copy = ::strdup(name);
  if (!own || !copy) throw ResourceError("there is no memory to make an endpoint.");
  std::free(own->src_addr);
  own->src_addr = copy;
  own->src_addrlen = std::strlen(copy) + 1;
  return own;
}

void remove_file(const std::string& address) noexcept {
  std::string_view name(address.c_str());
  if (!name.starts_with(kScheme)) return;
  name.remove_prefix(kScheme.size());
  if (name.starts_with(kOurs) && name.find('/') == name.npos) ::shm_unlink(name.data());
}

}  // namespace unisono::fabric
