// The bootstrap by the environment, with this test in place of the launcher. Each case is a process of its
// own, since a process has one launcher.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "processes.hpp"
#include "ranks.hpp"
#include "unisono/bootstrap.hpp"

namespace unisono::test {
namespace {

constexpr std::chrono::seconds kLong{60};
using Environment = std::map<std::string, std::string>;

void set(const Environment& environment) {
  for (const char* name : {"UNISONO_RANK", "UNISONO_SIZE", "UNISONO_BOOTSTRAP_FD", "WORLD_SIZE",
                           "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    ::unsetenv(name);
  for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
}

TEST(Environment, AProcessOfItsOwnIsAlone) {
  for (const Environment& environment : {Environment{}, {{"WORLD_SIZE", "1"}}, {{"UNISONO_RANK", ""}}}) {
    set(environment);
    const auto alone = environment_bootstrap(kLong);
    EXPECT_EQ(alone->rank(), 0);
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->all_gather("words"), std::vector<std::string>{"words"});
  }
}

TEST(Environment, WrongOnesAreRefused) {
  const std::string file = std::to_string(::dup(0));
  const std::vector<std::pair<Environment, const char*>> wrong = {
      {{{"WORLD_SIZE", "4"}}, "WORLD_SIZE=4 says that there are several ranks"},
      {{{"PMI_SIZE", "2"}}, "PMI_SIZE=2 says"},
      {{{"OMPI_COMM_WORLD_SIZE", "3"}}, "unisono/mpi.hpp"},
      {{{"SLURM_STEP_NUM_TASKS", "3"}}, "unset that variable"},
      {{{"UNISONO_RANK", "0"}}, "UNISONO_SIZE='' is not a whole number"},
      {{{"UNISONO_SIZE", "2"}}, "UNISONO_RANK='' is not a whole number"},
      {{{"UNISONO_RANK", "-1"}, {"UNISONO_SIZE", "2"}}, "UNISONO_RANK='-1'"},
      {{{"UNISONO_RANK", "99999999999"}, {"UNISONO_SIZE", "2"}}, "UNISONO_RANK='99999999999'"},
      {{{"UNISONO_RANK", "2"}, {"UNISONO_SIZE", "2"}}, "UNISONO_RANK=2 must be below UNISONO_SIZE=2"},
      {{{"UNISONO_RANK", "1"}, {"UNISONO_SIZE", "2"}}, "UNISONO_BOOTSTRAP_FD= is no file descriptor"},
      {{{"UNISONO_RANK", "1"}, {"UNISONO_SIZE", "2"}, {"UNISONO_BOOTSTRAP_FD", "7x"}},
       "UNISONO_BOOTSTRAP_FD=7x is no"},
      {{{"UNISONO_RANK", "1"}, {"UNISONO_SIZE", "2"}, {"UNISONO_BOOTSTRAP_FD", "2"}},
       "UNISONO_BOOTSTRAP_FD=2 is no"},
      {{{"UNISONO_RANK", "1"}, {"UNISONO_SIZE", "2"}, {"UNISONO_BOOTSTRAP_FD", file}},
       "is not the launcher's socket here"},
      {{{"UNISONO_RANK", "1"}, {"UNISONO_SIZE", "2"}, {"UNISONO_BOOTSTRAP_FD", "999999"}},
       "is not the launcher's socket here"},
  };
  for (const auto& [environment, part] : wrong) {
    set(environment);
    const std::string text = text_of<UsageError>([] { environment_bootstrap(kLong); });
    EXPECT_TRUE(has(text, part)) << text;
  }
  set({});
  EXPECT_TRUE(
      has(text_of<UsageError>([] { environment_bootstrap(std::chrono::seconds(0)); }), "is no deadline"));
}

// A message of the launcher's, in network byte order.
struct Message {
  char magic[4] = {'U', 'N', 'S', 'O'};
  std::uint8_t version = 1, kind = 1;
  std::uint16_t zero = 0;
  std::uint32_t rank = 0, channel = 0, sequence = 0, timeout_ms = 0, length = 0;

  std::string with(const std::string& payload) const {
    Message sent = *this;
    sent.length = htonl(static_cast<std::uint32_t>(payload.size()));
    return std::string(reinterpret_cast<const char*>(&sent), sizeof sent) + payload;
  }
};
static_assert(sizeof(Message) == 28);

std::string answer(std::uint32_t rank, const std::string& payload, std::uint32_t sequence = 0,
                   std::uint32_t channel = 0) {
  Message message;
  message.rank = htonl(rank);
  message.sequence = htonl(sequence);
  message.channel = htonl(channel);
  return message.with(payload);
}

// Runs `body` as rank 1 of 2, and launcher(socket) beside it. Expects that both end well.
void as_rank(const std::function<bool()>& body, const std::function<void(int)>& launcher) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  {
    Child rank([&] {
      ::close(ends[0]);
      set({{"UNISONO_RANK", "1"}, {"UNISONO_SIZE", "2"}, {"UNISONO_BOOTSTRAP_FD", std::to_string(ends[1])}});
      return body() ? 0 : 1;
    });
    ::close(ends[1]);
    launcher(ends[0]);
    EXPECT_EQ(rank.wait(), 0);
  }
  ::close(ends[0]);
}

void write_all(int socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    bytes.remove_prefix(static_cast<std::size_t>(sent));
  }
}

// Reads one message.
std::pair<Message, std::string> read_one(int socket) {
  auto read = [&](void* to, std::size_t bytes) {
    EXPECT_EQ(::recv(socket, to, bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
  };
  Message message;
  read(&message, sizeof message);
  std::string payload(ntohl(message.length), '\0');
  if (!payload.empty()) read(payload.data(), payload.size());
  return {message, payload};
}

TEST(Environment, TheLauncherBringsRanksTogether) {
  const std::string large(1 << 20, 'l');
  as_rank(
      [&] {
        const auto first = environment_bootstrap(kLong),
                   second = environment_bootstrap(std::chrono::milliseconds(2500));
        return first->rank() == 1 && first->size() == 2 &&
               first->all_gather("mine") == std::vector<std::string>{"", "mine"} &&
               first->all_gather(large) == std::vector<std::string>{large, large} &&
               second->all_gather("") == std::vector<std::string>{"x", ""} &&
               has(text_of<UsageError>([&] { first->all_gather(large + "l"); }), "at most 1 MiB");
      },
      [&](int socket) {
        auto serve = [&](std::uint32_t channel, std::uint32_t sequence, std::uint32_t ms,
                         const std::string& other) {
          const auto [message, payload] = read_one(socket);
          EXPECT_EQ(std::string(message.magic, 4), "UNSO");
          EXPECT_EQ(message.version, 1);
          EXPECT_EQ(message.kind, 1);
          EXPECT_EQ(ntohl(message.rank), 1U);
          EXPECT_EQ(ntohl(message.channel), channel);
          EXPECT_EQ(ntohl(message.sequence), sequence);
          EXPECT_EQ(ntohl(message.timeout_ms), ms);
          write_all(socket, answer(0, other, sequence, channel) + answer(1, payload, sequence, channel));
        };
        serve(0, 0, 60000, "");
        serve(0, 1, 60000, large);
        serve(1, 0, 2500, "x");
      });
}

template <class E>
void expect_end(const std::string& answered, const std::string& part) {
  as_rank(
      [&] {
        const auto bootstrap = environment_bootstrap(kLong);
        for (int again = 0; again < 2; ++again) {  // the failure stays
          const std::string text = text_of<E>([&] { bootstrap->all_gather("mine"); });
          if (!has(text, part)) return std::fprintf(stderr, "%s\n", text.c_str()), false;
        }
        return true;
      },
      [&](int socket) {
        read_one(socket);
        write_all(socket, answered);
        ::shutdown(socket, SHUT_WR);
      });
}

Message of_kind(std::uint8_t kind) {
  Message message;
  message.kind = kind;
  return message;
}

TEST(Environment, TheLaunchersErrorsAreTheRanks) {
  expect_end<PeerLostError>(of_kind(2).with("rank 0 was killed"), "rank 0 was killed");
  expect_end<TimeoutError>(answer(0, "") + of_kind(3).with("rank 0 is late"), "rank 0 is late");
  expect_end<MismatchError>(of_kind(4).with("another order"), "another order");
  expect_end<Error>(of_kind(5).with("no message"), "no message");
  expect_end<PeerLostError>("", "the launcher (`unisono run`) has ended");
  expect_end<PeerLostError>(answer(0, "x").substr(0, 20), "the launcher (`unisono run`) has ended");
}

TEST(Environment, BytesThatAreNoAnswerAreRefused) {
  const char* const none = "no message of this version";
  expect_end<Error>(std::string(100, 'z'), none);
  Message message;
  message.version = 2;
  expect_end<Error>(message.with(""), none);
  message = {};
  message.zero = 1;
  expect_end<Error>(message.with(""), none);
  expect_end<Error>(of_kind(0).with(""), none);
  expect_end<Error>(of_kind(6).with(""), none);
  expect_end<Error>(of_kind(1).with(std::string((1 << 20) + 1, 'x')), none);
  expect_end<Error>(answer(1, "") + answer(0, ""), "out of order");
  expect_end<Error>(answer(0, "", 1), "out of order");
  expect_end<Error>(answer(0, "", 0, 3), "out of order");
  expect_end<Error>(answer(0, "") + answer(1, "") + answer(2, ""), "more than one answer");
}

TEST(Environment, AChildOfARankIsRefused) {
  as_rank(
      [] {
        const auto bootstrap = environment_bootstrap(kLong);
        Child child([&] {
          return has(text_of<UsageError>([&] { bootstrap->all_gather("mine"); }), "was forked from a rank")
                     ? 0
                     : 1;
        });
        return child.wait() == 0;
      },
      [](int) {});
}

TEST(Environment, ASilentLauncherIsATimeout) {
  as_rank(
      [] {
        const auto bootstrap = environment_bootstrap(std::chrono::milliseconds(1));
        return has(text_of<TimeoutError>([&] { bootstrap->all_gather("mine"); }), "did not answer");
      },
      [](int socket) { read_one(socket); });
}

}  // namespace
}  // namespace unisono::test
