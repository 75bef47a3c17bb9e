// Provider shm keeps an endpoint in a file of shared memory, which stays behind when its process is killed,
// and names it after the process: the next process of that number would be refused.
#pragma once

#include <string>

#include "fabric/provider.hpp"

namespace unisono::fabric {

// What an endpoint is made from, so that its file has a name that no other will have; other providers': as
// it is.
Info with_own_file(const Info& nic);

// Removes the file of the endpoint with that address, if it has one. Its process must have died.
void remove_file(const std::string& address) noexcept;

}  // namespace unisono::fabric
