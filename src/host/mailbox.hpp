// Messages with tags between the ranks of one machine, beside the calls that take turns.
//
// Each rank has a ring of bytes from every rank, itself too, in its shared memory. Records in it are small
// messages whole (eager), offers of large ones, and after a receive has accepted such an offer, its parts. A
// ring can always be emptied, since a message that no receive waits for is kept on the heap. Whoever waits
// moves everything of this rank on. For messages that have begun, a thread of the communicator waits.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/request.hpp"
#include "core/work.hpp"
#include "host/wait.hpp"

namespace unisono {

class Group;

class Mailbox {
 public:
  // Returns the bytes of shared memory that a rank of so many gives.
  static std::size_t bytes(int ranks);
  // check: compare the dtypes of both ends.
  Mailbox(Group& group, bool check);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;

  // Sends or receives, and waits for it.
  Received run(const Message& message);
  // Begins. The threads run what moves the message on, and its callbacks.
  std::shared_ptr<Work::State> begin(const Message& message, CallThreads& threads);

 private:
  struct Head {
    enum Kind : std::uint32_t { eager, offer, accept, part };
    Kind kind;
    std::int32_t tag;
    std::uint64_t bytes;   // of the message, or of the part
    std::uint64_t number;  // offer, accept: the sender's; part: the receiver's
    std::uint64_t other;   // accept: the receiver's
    DType dtype;
  };

  // One writer, one reader. Counts never go back.
  struct Ring {
    alignas(64) std::atomic<std::uint64_t> written;
    alignas(64) std::atomic<std::uint64_t> taken;
    std::atomic<std::uint32_t> blocked;  // the writer waits for room
    std::byte* data() { return reinterpret_cast<std::byte*>(this + 1); }
  };

  struct Letter : Message {
    explicit Letter(const Message& message) : Message(message) {}
    std::uint64_t moved = 0;       // bytes
    std::uint64_t other = 0;       // the receiver's number
    std::atomic<int> source = -1;  // of an offer that has been accepted
    std::atomic<bool> done = false;
    Received received;
    std::shared_ptr<Work::State> state;  // of one that has begun
    std::chrono::duration<double> waited{};
  };

  // A message that has come before its receive.
  struct Kept {
    int source;
    Head head;
    std::vector<std::byte> data;  // empty of an offer
  };
  using Sent = std::shared_ptr<Letter>;
  struct Outbox {
    std::deque<Head> accepts;
    std::deque<Sent> letters;  // which have not been announced
    std::deque<Sent> streams;  // which have been accepted
    bool empty() const { return accepts.empty() && letters.empty() && streams.empty(); }
  };

  host::Line& bell(int rank) const;
  Ring& ring(int reader, int writer) const;

  // All of these require the lock.
  void post(const Sent& letter);
  void progress();
  void take_records(int source);
  void take(int source, const Head& head, Ring& from, std::uint64_t at);
  void push(int peer);
  bool put(int peer, const Head& head, const std::byte* data, std::size_t bytes);
  void accept(int source, std::uint64_t offer, const Sent& letter);
  void check(const Letter& letter, int source, DType dtype, std::uint64_t bytes);
  void complete(const Sent& letter, int source);
  void forget(const Sent& letter);

  bool arrived(const Letter& letter);
  bool news() const;
  void look(const Letter& letter, bool of_caller);
  [[noreturn]] void late(const Letter& letter);
  std::string where(const Letter& letter) const;
  void drive(CallThreads& threads);
  void call_back(CallThreads& threads);
  void rest(std::chrono::nanoseconds elapsed);
  void give_up(const Sent& letter);
  double timeout_of(const Letter& letter) const;

  Group& group_;
  const int rank_, size_;
  const bool check_;
  std::mutex mutex_;
  std::atomic<std::uint32_t> heard_;  // the bell's count when this rank has last looked at all rings
  std::vector<Outbox> outboxes_;
  std::atomic<bool> blocked_ = false;  // a ring had no room
  std::list<Sent> posted_;             // receives, in the order in which they came
  std::list<Kept> unexpected_;         // messages, in the order in which they came
  std::uint64_t numbers_ = 0;
  std::unordered_map<std::uint64_t, Sent> offered_, accepted_;
  std::list<Sent> begun_;
  bool driven_ = false;
  const Letter* own_ = nullptr;                // whose waiter moves things on now
  std::vector<Work::State::Callbacks> ended_;  // of letters, for the threads
};

}  // namespace unisono
