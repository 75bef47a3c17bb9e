// A second process for a test: a fork that talks over pipes.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <functional>
#include <stdexcept>

namespace unisono::test {

// A pipe for trivially copyable values.
class Pipe {
 public:
  Pipe() {
    if (::pipe(ends_) != 0) throw std::runtime_error("no pipe");
  }
  Pipe(const Pipe&) = delete;
  ~Pipe() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  template <class T>
  void send(const T& value) {
    if (::write(ends_[1], &value, sizeof value) != static_cast<ssize_t>(sizeof value))
      throw std::runtime_error("pipe not written");
  }
  template <class T>
  T receive() {
    T value;
    if (::read(ends_[0], &value, sizeof value) != static_cast<ssize_t>(sizeof value))
      throw std::runtime_error("pipe not read");
    return value;
  }

 private:
  int ends_[2];
};

// A forked process. Its exit status is what `body` returns, or 99 if `body` throws.
class Child {
 public:
  explicit Child(const std::function<int()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::alarm(120);  // seconds; ends the child if the test ends without it
    int status = 99;
    try {
      status = body();
    } catch (...) {}
    ::_exit(status);
  }
  Child(const Child&) = delete;
  ~Child() { wait(); }
  int pid() const { return pid_; }

  // Waits for the child's end. Returns its exit status, or -1 if a signal has ended it.
  int wait() {
    if (waited_) return status_;
    waited_ = true;
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) continue;
    return status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  int pid_, status_ = -1;
  bool waited_ = false;
};

}  // namespace unisono::test
