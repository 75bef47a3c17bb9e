// Messages with tags between the ranks of one node, and of others over a transport, beside the calls that
// take turns.
//
// Each rank has a ring from every rank, itself too, in its shared memory (host/mail_ring.hpp). Records in it
// are pieces of small messages (eager) and offers of large ones. The receiver of an offer copies the message
// from the sender's memory, if it reaches that, and tells the sender when it has. A sender that waits
// meanwhile copies a share of it, if it reaches the receiver's memory. Otherwise the receiver accepts the
// offer, and the sender writes the message in parts. A ring can always be emptied, since a message that no
// receive waits for is kept on the heap. Whoever waits moves everything of this rank on. While no one waits,
// a thread of the communicator moves messages that have begun. Between nodes a transport carries the records,
// and an accepted message as a whole, if it can.
//
// A call whose message goes at once, since nothing else is under way, makes no letter.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/request.hpp"
#include "core/work.hpp"
#include "host/call_ways.hpp"
#include "host/mail_ring.hpp"
#include "host/symmetric.hpp"
#include "host/wait.hpp"
#include "unisono/transport.hpp"

namespace unisono {

class Group;

class Mailbox {
 public:
  // The ranks of other nodes. Its functions are called by one thread at a time, except `hear`. What they
  // throw ends the letters that are waited for.
  struct Abroad {
    int rank = 0;  // this rank among all
    double timeout_s = 0;
    std::vector<int> group_number;  // of each of all ranks; -1: it is on another node
    std::size_t most_bytes = 0;     // of a record's data
    virtual ~Abroad() = default;
    // As Transport::Records.
    virtual bool send(int to, std::span<const std::byte> head, std::span<const std::byte> data) = 0;
    virtual std::size_t under_way(int to) = 0;
    virtual std::optional<int> take(std::vector<std::byte>& record) = 0;
    virtual std::unique_ptr<Transport::Pending> send_long(const Outgoing& message) = 0;
    virtual std::unique_ptr<Transport::Pending> receive_long(const Incoming& message) = 0;
    // Moves on what has begun. Returns whether it is complete.
    virtual bool test(Transport::Pending& pending) = 0;
    virtual void hear() = 0;                                   // throws what other ranks have told
    virtual void failed(const std::exception_ptr& error) = 0;  // tells the others
  };

  // check: compare the dtypes of both ends. abroad: null if the group has all ranks.
  Mailbox(Group& group, const Symmetric& symmetric, bool check, std::unique_ptr<Abroad> abroad = {});
  // Waits until no thread waits in it for a letter. Requires: those that have begun have ended.
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;

  // Sends or receives, and waits for it.
  Received run(const Message& message);
  // Begins. The threads run what moves the message on, and its callbacks.
  std::shared_ptr<Work::State> begin(const Message& message, CallThreads& threads);

 private:
  using Head = MailHead;
  static_assert(sizeof(Head) <= Transport::Records::kMostHead);

  // Threads that wait for letters share this with the mailbox, which may end before they have left.
  struct Door {
    std::mutex mutex;
    Mailbox* mailbox;  // null: it is gone
    std::atomic<int> waiters = 0;
  };
  class Waiter;
  struct Letter;
  // Says whose waiter moves things on, under the lock.
  struct Own {
    Own(const Letter*& at, const Letter& letter) : own(at) { own = &letter; }
    ~Own() { own = nullptr; }
    Own(const Own&) = delete;
    const Letter*& own;
  };

  struct Letter final : Message, Work::State {
    explicit Letter(const Message& message, std::shared_ptr<Door> of = {})
        : Message(message), State(Message::what()), door(std::move(of)) {}
    void move_on(std::optional<Clock::time_point> until) override;
    using Message::what;
    int other_end() const { return sends ? peer : source.load(); }
    std::size_t whole() const { return sends ? bytes : static_cast<std::size_t>(expected); }

    std::uint64_t expected = 0;    // bytes that a receive gets
    std::uint64_t moved = 0;       // bytes
    std::uint64_t number = 0;      // of an offer: the sender's
    std::uint64_t other = 0;       // the receiver's number
    std::atomic<int> source = -1;  // of an offer that has met its receive
    std::byte* theirs = nullptr;   // the peer's memory, from or to which it is copied
    bool copied_now = false;       // a thread does so, without the lock
    bool shared = false;           // both ends do so (MailRing::portions)
    bool refused = false;          // the kernel has not done so
    bool in_pieces = false;        // it comes so, rather than by one copy
    Clock::time_point met;         // when a large one has met its receive, if this rank learns from it
    // of one that has begun
    const std::shared_ptr<Door> door;  // null: it has not
    int waiters = 0;
    std::function<void()> last;  // its callbacks, for the first waiter that leaves
    std::chrono::duration<double> waited{};
  };

  // A message that has come before its receive, or a part of it.
  struct Kept {
    int source;
    Head head;
    std::vector<std::byte> data;  // empty of an offer
  };
  using Sent = std::shared_ptr<Letter>;
  struct Inbox {
    std::unique_ptr<MailReader> ring;  // null: from another node
    host::CallWays ways;               // of large messages
    // of a message whose first piece has come
    Sent letter;
    Kept* kept = nullptr;
    Sent shared;         // which the source copies too
    bool alone = false;  // the kernel has refused that once
  };
  struct Outbox {
    std::unique_ptr<MailWriter> ring;  // null: to another node
    std::deque<Head> answers;
    std::deque<Sent> letters;  // which have not been announced
    std::deque<Sent> streams;  // which have been accepted
    // to another node: records so far, and short letters with the number of their record
    std::uint64_t records = 0;
    std::deque<std::pair<std::uint64_t, Sent>> leaving;
    bool empty() const { return answers.empty() && letters.empty() && streams.empty() && leaving.empty(); }
  };
  using Lock = std::unique_lock<std::mutex>;

  // Messages name a rank by its number among all, the group by another.
  bool near(int rank) const { return number(rank) >= 0; }
  int number(int rank) const {
    return abroad_ ? abroad_->group_number[static_cast<std::size_t>(rank)] : rank;
  }
  std::string name(int rank) const;

  host::Line& bell(int rank) const { return MailRing::bell(group_, number(rank)); }
  MailWriter& to(int rank) { return *outboxes_[static_cast<std::size_t>(rank)].ring; }
  MailReader& from(int rank) { return *inboxes_[static_cast<std::size_t>(rank)].ring; }
  MailRing& ring_of(const Letter& letter);
  std::optional<Place> offer_of(const Message& message);
  std::size_t piece_bytes(int peer) const;  // at most, of a record's data

  // All of these require the lock.
  void post(const Sent& letter);
  void progress();
  void take_records(int source);
  void take_records_from_abroad();
  void take(int source, const MailRecord& record);
  void take_more(int source, const MailRecord& record);
  void pop(int source, const MailRecord& record);
  [[noreturn]] void no_message(int source);
  void push(int peer);
  void complete_those_that_left(int peer);
  bool begin_long(const Sent& letter);
  void complete_long_ones();
  bool put(int peer, const Head& head, const std::byte* data, std::size_t bytes);
  bool put_pieces(const Message& message, std::size_t& moved);
  bool put_abroad(int peer, const Head& head, std::span<const std::byte> data);
  void meet(const Sent& letter, int source, const Head& head);
  void accept(const Sent& letter);
  void check(const Message& message, int source, DType dtype, std::uint64_t bytes);
  void received(const Sent& letter, int source);
  void complete(const Sent& letter, int source);
  void end(const Sent& letter, std::exception_ptr error, const Received& received = {});
  void end_all(Lock& lock, std::exception_ptr error);
  void forget(Lock& lock, const Sent& letter);

  // Move a message if no other has to move before.
  bool send_at_once(const Message& message, std::size_t& moved);
  bool receive_at_once(const Message& message, Received& received, Sent& letter);
  bool idle() const;

  // Say where a message's memory is, for the rank at its other end, and copy it.
  Place place(const std::byte* at, std::size_t bytes, int peer) const;
  std::byte* reach(const Place& place, int peer, std::size_t bytes) const;
  void share(const Sent& letter);
  void copy_some(Lock& lock);
  std::pair<host::Portion, bool> copy_part(const Letter& letter);
  void count_copied(const Sent& letter, std::size_t bytes, bool all);

  // Learn whether large messages of a source had better be copied by the kernel or come in pieces.
  bool learns(int source, std::size_t bytes) const;
  void learn(int source, std::size_t bytes, bool in_pieces, Clock::time_point met);

  bool arrived(const Letter& letter);
  void wait(const Letter& letter, std::optional<Clock::time_point> until);
  bool news() const;
  void part_from(int peer);
  void look(const Letter& letter, bool of_caller);
  void look_at_begun(Clock::duration gap);
  [[noreturn]] void late(const Letter& letter);
  std::string where(const Letter& letter) const;
  void drive();
  void rest(std::chrono::nanoseconds elapsed, std::chrono::microseconds yielding);
  void give_up(const Sent& letter);
  double timeout_of(const Letter& letter) const;

  Group& group_;
  const std::unique_ptr<Abroad> abroad_;
  const Symmetric& symmetric_;
  const int rank_, size_;
  const bool check_;
  const std::shared_ptr<Door> door_ = std::make_shared<Door>();
  std::mutex& mutex_ = door_->mutex;
  host::Cells cells_;                 // of messages to ranks of this node
  std::atomic<std::uint32_t> heard_;  // the bell's count when this rank has last looked at all rings
  std::deque<Inbox> inboxes_;         // of each rank
  std::deque<Outbox> outboxes_;
  std::atomic<bool> blocked_ = false;  // a ring had no room
  std::list<Sent> posted_;             // receives, in the order in which they came
  std::list<Kept> unexpected_;         // messages, in the order in which they came
  std::atomic<bool> keeps_ = false;    // there are such
  std::uint64_t numbers_ = 0;
  std::unordered_map<std::uint64_t, Sent> offered_, accepted_;
  std::list<Sent> copies_;             // letters that wait for a thread to copy
  std::atomic<bool> to_copy_ = false;  // there are such
  std::condition_variable copied_;
  std::vector<std::byte> record_;                                         // from abroad
  std::list<std::pair<Sent, std::unique_ptr<Transport::Pending>>> long_;  // to and from abroad
  std::list<Sent> begun_;
  CallThreads* threads_ = nullptr;  // of letters that have begun
  bool driven_ = false;
  const Letter* own_ = nullptr;  // whose waiter moves things on now
};

}  // namespace unisono
