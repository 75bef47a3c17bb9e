// A second process for a test: a fork that talks over pipes.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <functional>
#include <stdexcept>

namespace unisono::test {

// One way, for trivially copyable things.
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
  void send(const T& what) {
    if (::write(ends_[1], &what, sizeof what) != static_cast<ssize_t>(sizeof what))
      throw std::runtime_error("pipe not written");
  }
  template <class T>
  T receive() {
    T what;
    if (::read(ends_[0], &what, sizeof what) != static_cast<ssize_t>(sizeof what))
      throw std::runtime_error("pipe not read");
    return what;
  }

 private:
  int ends_[2];
};

// Forks; the child ends with what `body` returns, 99 when it throws.
class Child {
 public:
  explicit Child(const std::function<int()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::alarm(120);  // should the test end before it
    int status = 99;
    try {
      status = body();
    } catch (...) {}
    ::_exit(status);
  }
  Child(const Child&) = delete;
  ~Child() { wait(); }
  int pid() const { return pid_; }

  // Its exit status, -1 when a signal has ended it.
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
