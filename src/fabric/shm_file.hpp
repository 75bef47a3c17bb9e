// Provider shm keeps an endpoint in a file of shared memory, which stays behind when its process is killed,
// and names it after the process: the next process of that number would be refused. Ours have names of their
// own, and their process holds a lock (flock) on them, which ends with it: a file that nobody holds is left.
#pragma once

#include <string>

#include "fabric/provider.hpp"

namespace unisono::fabric {

// What an endpoint is made from, so that its file has a name that no other will have; other providers': as
// it is.
Info with_own_file(const Info& nic);

// The lock on the file of an endpoint.
class ShmLock {
 public:
  ShmLock() = default;
  ShmLock(const ShmLock&) = delete;
  ~ShmLock();
  // Whether the file of the endpoint with that address, if it has one of ours, is held now. If not, another
  // process has taken it for one that was left, before it was held: the endpoint is of no use.
  bool take(const std::string& address);

 private:
  int file_ = -1;
};

// Removes the file of the endpoint with that address, if it has one. Its process must have died.
void remove_file(const std::string& address) noexcept;

// Removes the files of processes that have died.
void remove_left_files() noexcept;

}  // namespace unisono::fabric
