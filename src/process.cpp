#include "process.hpp"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <functional>
#include <string>

namespace unisono {

std::uint64_t this_machine() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat pid_namespace{};
  if (::stat("/proc/self/ns/pid", &pid_namespace) == 0) boot += std::to_string(pid_namespace.st_ino);
  return std::hash<std::string>{}(boot);
}

Process::Process(int pid) : pid_(pid), own_(pid == ::getpid()) {
  if (!own_) descriptor_ = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
}

Process::~Process() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool Process::dead() const {
  if (own_) return false;
  if (descriptor_ < 0) return ::kill(pid_, 0) != 0 && errno == ESRCH;  // a kernel without pidfd_open
  pollfd ended{descriptor_, POLLIN, 0};
  return ::poll(&ended, 1, 0) > 0;
}

}  // namespace unisono
