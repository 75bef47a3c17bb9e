#include "base/process.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <functional>
#include <string>

namespace unisono {

namespace {

std::string boot_id() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return boot;
}

}  // namespace

std::uint64_t this_boot() { return std::hash<std::string>{}(boot_id()); }

std::uint64_t this_machine() {
  std::string boot = boot_id();
  struct stat pid_namespace{};
  if (::stat("/proc/self/ns/pid", &pid_namespace) == 0) boot += std::to_string(pid_namespace.st_ino);
  return std::hash<std::string>{}(boot);
}

unsigned forks() {
  static std::atomic<unsigned> count = 0;
  [[maybe_unused]] static const int counted =
      ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  return count.load(std::memory_order_relaxed);
}

Cores Cores::of_this_process() {
  Cores mine;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return mine;
  for (int i = 0; i < 1024 && i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &cores)) mine.words[i / 64] |= std::uint64_t{1} << (i % 64);
  return mine;
}

void Cores::add(const Cores& others) {
  for (int i = 0; i < 16; ++i) words[i] |= others.words[i];
}

int Cores::count() const {
  int all = 0;
  for (const std::uint64_t word : words) all += std::popcount(word);
  return all;
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
