// Machines, forks, cores, and the processes of other ranks on this machine.
#pragma once

#include <cstdint>
#include <utility>

namespace unisono {

// Returns a hash of boot and PID namespace. Only ranks of one hash see each other's processes or share
// memory.
std::uint64_t this_machine();
// Returns a hash of the boot alone, which containers of a machine share.
std::uint64_t this_boot();

// Returns how many forks lie between this process and the first that called it. Resources shared before a
// fork stay the parent's: a child that ends must not give them back.
unsigned forks();

// The cores of a machine on which ranks may run, as ranks tell each other.
struct Cores {
  std::uint64_t words[16] = {};

  static Cores of_this_process();
  void add(const Cores& others);
  int count() const;
};

class Process {
 public:
  explicit Process(int pid);
  Process(Process&& other) noexcept
      : pid_(other.pid_), own_(other.own_), descriptor_(std::exchange(other.descriptor_, -1)) {}
  ~Process();

  int pid() const { return pid_; }
  bool own() const { return own_; }  // whether it is this process
  bool dead() const;                 // whether it has ended, or is a zombie

 private:
  int pid_;
  bool own_;
  int descriptor_ = -1;  // a pidfd; -1 for this process
};

}  // namespace unisono
