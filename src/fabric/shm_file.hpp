// The files of endpoints of provider shm. The provider keeps an endpoint in a file of shared memory, which
// stays behind when the process is killed, and names it after the process. A later process of the same number
// would be refused. Unisono's files have unique names, and a lock (flock) that ends with the process: a file
// without a lock is left over.
#pragma once

#include <string>

#include "fabric/provider.hpp"

namespace unisono::fabric {

// Returns a copy of shm's entry with a unique name for an endpoint's file. Returns any other entry as it is.
Info with_own_file(const Info& nic);

// The lock on the file of an endpoint.
class ShmLock {
 public:
  ShmLock() = default;
  ShmLock(const ShmLock&) = delete;
  ~ShmLock();
  // Locks the file of the endpoint with that address, if Unisono has named one. Returns false if another
  // process has removed the file as left over before it was locked: the endpoint is then of no use.
  bool take(const std::string& address);

 private:
  int file_ = -1;
};

// Removes the file of the endpoint with that address, if it has one. Its process must have died.
void remove_file(const std::string& address) noexcept;

// Removes the files of processes that have died.
void remove_left_files() noexcept;

}  // namespace unisono::fabric
