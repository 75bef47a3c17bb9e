// The bootstrap of ranks that `unisono run` has started, over the launcher's socket. The launcher's half and
// the format of the messages are in python/unisono/bootstrap/hub.py.
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <string_view>

#include "base/deadline.hpp"
#include "base/process.hpp"
#include "unisono/bootstrap.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

constexpr const char *kRank = "UNISONO_RANK", *kSize = "UNISONO_SIZE", *kSocket = "UNISONO_BOOTSTRAP_FD";
constexpr std::size_t kMostBytes = 1 << 20;               // of a rank, at once
constexpr std::chrono::duration<double> kAnswerGrace{5};  // for the launcher to say who is missing
constexpr std::chrono::milliseconds kPoll{100};           // below kMostCounted

struct Header {
  char magic[4] = {'U', 'N', 'S', 'O'};
  std::uint8_t version = 1, kind = 0;
  std::uint16_t zero = 0;
  std::uint32_t rank = 0, channel = 0, sequence = 0, timeout_ms = 0, length = 0;  // in network byte order
};
static_assert(sizeof(Header) == 28);
enum Kind : std::uint8_t { kData = 1, kLost = 2, kTimeout = 3, kMismatch = 4, kInvalid = 5 };

// Throws what the launcher says.
[[noreturn]] void raise(std::uint8_t kind, const std::string& text) {
  switch (kind) {
    case kLost: throw PeerLostError(text);
    case kTimeout: throw TimeoutError(text);
    case kMismatch: throw MismatchError(text);
    default: throw Error(text);
  }
}

[[noreturn]] void launcher_ended() {
  throw PeerLostError("the launcher (`unisono run`) has ended: the ranks cannot meet without it.");
}

// The process's socket to the launcher: one all_gather at a time, and none after one that has failed.
class Launcher {
 public:
  static Launcher& of_this_process() {
    static Launcher one;
    return one;
  }
  std::uint32_t new_channel() {
    const std::scoped_lock lock(mutex_);
    return channels_++;
  }

  // Sends `mine`, and returns what every rank has sent.
  std::vector<std::string> exchange(const Header& header, const std::string& mine, int ranks,
                                    std::chrono::duration<double> timeout) {
    const std::scoped_lock lock(mutex_);
    if (forks_ != forks())
      throw UsageError(
          "this process was forked from a rank and is none itself: make the communicator in the "
          "rank, or unset the UNISONO_* variables in its children.");
    if (failure_) std::rethrow_exception(failure_);
    try {
      send(std::string(reinterpret_cast<const char*>(&header), sizeof header) + mine, timeout);
      return receive(header, ranks, timeout + kAnswerGrace);
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }

 private:
  Launcher() {
    const char* text = std::getenv(kSocket);
    const std::string_view digits(text ? text : "");
    if (const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), fd_);
        error != std::errc() || end != digits.data() + digits.size() || fd_ <= 2)
      throw UsageError(std::string(kRank) + " is set, but " + kSocket + "=" +
                       std::string(digits.substr(0, 80)) +
                       " is no file descriptor of a launcher: start the program with `unisono run`, or unset "
                       "the UNISONO_* variables.");
    sockaddr address{};
    socklen_t length = sizeof address;
    int type = 0;
    socklen_t type_length = sizeof type;
    ucred launcher{};
    socklen_t launcher_length = sizeof launcher;
    if (::getsockname(fd_, &address, &length) != 0 || address.sa_family != AF_UNIX ||
        ::getsockopt(fd_, SOL_SOCKET, SO_TYPE, &type, &type_length) != 0 || type != SOCK_STREAM ||
        ::getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, &launcher, &launcher_length) != 0)
      throw UsageError(
          std::string(kSocket) + "=" + std::to_string(fd_) +
          " is not the launcher's socket here: this is probably a child of a rank, which does "
          "not inherit it; make the communicator in the rank, or unset the UNISONO_* variables.");
    ::fcntl(fd_, F_SETFD, FD_CLOEXEC);
    // The kernel ends this process with the launcher. A launcher behind a shell ends the process group.
    if (launcher.pid != ::getppid()) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (launcher.pid != ::getppid()) launcher_ended();
  }

  [[noreturn]] static void broke() {
    throw PeerLostError(std::string("the connection to the launcher (`unisono run`) broke: ") +
                        std::strerror(errno) + ".");
  }
  static bool again() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }
  template <class Done>
  void wait(const Done& done, short event, std::chrono::duration<double> timeout) const {
    wait_until(
        done, timeout,
        [&](auto) {
          pollfd one{fd_, event, 0};
          ::poll(&one, 1, static_cast<int>(kPoll.count()));
        },
        [] {},
        [] {
          throw TimeoutError("the launcher (`unisono run`) did not answer: see whether it is stopped.");
        });
  }

  void send(std::string_view rest, std::chrono::duration<double> timeout) const {
    const auto done = [&] {
      if (rest.empty()) return true;
      const ssize_t sent = ::send(fd_, rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) rest.remove_prefix(static_cast<std::size_t>(sent));
      else if (errno == EPIPE || errno == ECONNRESET) rest = {};  // the answer says why
      else if (!again()) broke();
      return rest.empty();
    };
    wait(done, POLLOUT, timeout);
  }

  std::vector<std::string> receive(const Header& own, int ranks,
                                   std::chrono::duration<double> timeout) const {
    std::vector<std::string> all;
    std::string stream;
    const auto complete = [&] { return all.size() == static_cast<std::size_t>(ranks); };
    const auto done = [&] {
      if (complete()) return true;
      char piece[1 << 16];
      const ssize_t got = ::recv(fd_, piece, sizeof piece, MSG_DONTWAIT);
      if (got == 0) launcher_ended();
      if (got < 0 && !again()) broke();
      if (got > 0) stream.append(piece, static_cast<std::size_t>(got));
      while (!complete())
        if (auto one = cut(stream, own, all.size())) all.push_back(std::move(*one));
        else break;
      return complete();
    };
    wait(done, POLLIN, timeout);
    if (!stream.empty()) throw Error("the launcher sent more than one answer.");
    return all;
  }

  // Takes the message of rank `rank` from the front of what has arrived, if the whole of it is there.
  static std::optional<std::string> cut(std::string& stream, const Header& own, std::size_t rank) {
    Header header;
    if (stream.size() < sizeof header) return {};
    std::memcpy(&header, stream.data(), sizeof header);
    const std::size_t length = ntohl(header.length);
    if (std::memcmp(header.magic, own.magic, sizeof own.magic) != 0 || header.version != own.version ||
        header.kind < kData || header.kind > kInvalid || header.zero != 0 || length > kMostBytes)
      throw Error("the launcher sent bytes that are no message of this version: use one version of Unisono.");
    if (stream.size() < sizeof header + length) return {};
    std::string payload = stream.substr(sizeof header, length);
    stream.erase(0, sizeof header + length);
    if (header.kind != kData) raise(header.kind, payload);
    if (ntohl(header.rank) != rank || header.channel != own.channel || header.sequence != own.sequence)
      throw Error("the launcher answered out of order: start the ranks again.");
    return payload;
  }

  std::mutex mutex_;
  int fd_ = -1;
  const unsigned forks_ = forks();
  std::uint32_t channels_ = 0;
  std::exception_ptr failure_;
};

class LauncherBootstrap final : public Bootstrap {
 public:
  LauncherBootstrap(int rank, int size, std::chrono::duration<double> timeout)
      : rank_(rank), size_(size), timeout_(timeout), channel_(Launcher::of_this_process().new_channel()) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::string> all_gather(const std::string& data) override {
    if (data.size() > kMostBytes)
      throw UsageError("an all_gather of the bootstrap takes at most 1 MiB of a rank.");
    Header header;
    header.kind = kData;
    header.rank = htonl(static_cast<std::uint32_t>(rank_));
    header.channel = htonl(channel_);
    header.sequence = htonl(sequence_++);
    constexpr double kMostMs = std::numeric_limits<std::uint32_t>::max();
    header.timeout_ms =
        htonl(static_cast<std::uint32_t>(std::min(std::ceil(timeout_.count() * 1000), kMostMs)));
    header.length = htonl(static_cast<std::uint32_t>(data.size()));
    return Launcher::of_this_process().exchange(header, data, size_, timeout_);
  }

 private:
  int rank_, size_;
  std::chrono::duration<double> timeout_;
  std::uint32_t channel_, sequence_ = 0;
};

class AloneBootstrap final : public Bootstrap {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::vector<std::string> all_gather(const std::string& data) override { return {data}; }
};

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int number_of(const char* name) {
  const std::string_view text = variable(name);
  int number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number >= 0) return number;
  throw UsageError(std::string(name) + "='" + std::string(text.substr(0, 80)) +
                   "' is not a whole number from 0: start the program with `unisono run`, or unset " + kRank +
                   " and " + kSize + ".");
}

// Throws UsageError if another launcher says that there are several ranks.
void refuse_other_launchers() {
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    if (const std::string_view ranks = variable(name); !ranks.empty() && ranks != "1")
      throw UsageError(
          std::string(name) + "=" + std::string(ranks.substr(0, 80)) +
          " says that there are several ranks, but only `unisono run` tells C and C++ programs how "
          "to meet: start them with it, give a bootstrap of your own (unisono_init_by, or "
          "unisono/mpi.hpp in C++), or unset that variable.");
}

}  // namespace

std::shared_ptr<Bootstrap> environment_bootstrap(std::chrono::duration<double> timeout) {
  check_timeout_s(timeout.count());
  if (variable(kRank).empty() && variable(kSize).empty()) {
    refuse_other_launchers();
    return std::make_shared<AloneBootstrap>();
  }
  const int rank = number_of(kRank), size = number_of(kSize);
  if (rank >= size)
    throw UsageError(std::string(kRank) + "=" + std::to_string(rank) + " must be below " + kSize + "=" +
                     std::to_string(size) + ": start the program with `unisono run`, or unset both.");
  return std::make_shared<LauncherBootstrap>(rank, size, timeout);
}

}  // namespace unisono
