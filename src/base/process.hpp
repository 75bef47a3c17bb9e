// The processes of other ranks on this machine: which they are, and whether they still run.
#pragma once

#include <cstdint>
#include <utility>

namespace unisono {

// Boot and PID namespace: ranks that differ in it cannot see each other's processes, nor share memory.
std::uint64_t this_machine();
// The boot alone, which containers of a machine share.
std::uint64_t this_boot();

// Returns how many forks lie between this process and the first that asked. What was shared before a fork
// stays the parent's: a child that ends must not give it back.
unsigned forks();

// Cores of a machine on which ranks may run, as they tell each other.
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
  bool own() const { return own_; }  // this one
  bool dead() const;                 // it has ended, or is a zombie

 private:
  int pid_;
  bool own_;
  int descriptor_ = -1;  // a pidfd, of others
};

}  // namespace unisono
