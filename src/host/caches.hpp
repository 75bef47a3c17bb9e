// The sizes of this machine's caches.
#pragma once

#include <cstddef>
#include <string>

namespace unisono::host {

// Returns the bytes of the first core's data cache of that level, 2 or 3; 0: the system does not tell. The
// kernel knows what cores share. glibc, which is asked after it, may give the third level of an AMD
// processor's cores all together, 12 times what two of them have. kernel: where it tells.
std::size_t cache_bytes(int level, const std::string& kernel = "/sys/devices/system/cpu/cpu0/cache");

}  // namespace unisono::host
