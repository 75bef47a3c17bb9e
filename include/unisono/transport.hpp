// Transports, which carry messages between ranks of different nodes.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "unisono/version.hpp"

namespace unisono {

// A message to a rank: `bytes` bytes from `data`.
struct Outgoing {
  const void* data;
  std::size_t bytes;
  int to;
};

// A message from a rank: `bytes` bytes into `data`.
struct Incoming {
  void* data;
  std::size_t bytes;
  int from;
};

// The error of a transport if a message to or from a rank fails.
class UNISONO_API TransportError : public std::runtime_error {
 public:
  // The peer is lost, or the library has failed. why: the library's own words.
  TransportError(int peer, const std::string& why) : std::runtime_error(why), peer_(peer) {}
  // The peer's message has another length than the receive. sent: nothing if the library does not say.
  TransportError(int peer, std::optional<std::size_t> sent, std::size_t expected)
      : std::runtime_error("a message has another length"),
        peer_(peer),
        other_length_(true),
        sent_(sent),
        expected_(expected) {}

  int peer() const { return peer_; }
  bool other_length() const { return other_length_; }
  std::optional<std::size_t> sent() const { return sent_; }  // bytes
  std::size_t expected() const { return expected_; }         // bytes

 private:
  int peer_;
  bool other_length_ = false;
  std::optional<std::size_t> sent_;
  std::size_t expected_ = 0;
};

// Messages between the ranks of a communicator. Ranks are the communicator's numbers.
//
// Order: between two ranks, messages arrive in the order of the exchanges. Every rank begins its exchanges in
// the same order, and both ends of a message are in the same one.
// Threads: one thread at a time calls a transport, except `close`, which may come from any thread, and `tell`
// and `heard` of a transport with records.
// Errors: TransportError. The communicator then fails on every rank. Any other exception passes through the
// call and closes the communicator on this rank.
class UNISONO_API Transport {
 public:
  // An exchange that has begun. The destructor abandons one that is not complete: the transport then keeps
  // what the library may still touch, and the caller keeps the messages' memory.
  class Pending {
   public:
    virtual ~Pending() = default;
    // Moves the exchange on and returns whether it is complete: what was sent may be overwritten, and all
    // has been received. On a GPU: whether it is enqueued.
    virtual bool test() = 0;
    // Returns the peers whose messages are not complete.
    virtual std::vector<int> open() = 0;
  };

  // Messages that their receiver has not asked for, of which messages with tags are made.
  //
  // Order: between two ranks, records arrive in the order in which they were sent.
  // Threads: one thread at a time, beside one that calls the transport.
  class Records {
   public:
    virtual ~Records() = default;
    // Returns the most bytes of a record's data. Its head has at most kMostHead.
    static constexpr std::size_t kMostHead = 64;
    virtual std::size_t most_bytes() const { return 4000; }
    // Sends the head and the data as one record, of which it keeps a copy. Returns false if too many to that
    // rank are under way: the caller tries again.
    virtual bool send(int to, std::span<const std::byte> head, std::span<const std::byte> data) = 0;
    // Returns how many records to a rank are under way: the library still needs this rank for them.
    virtual std::size_t under_way(int to) = 0;
    // Takes the next record that has come, of any rank. Returns its sender, or nothing if there is none.
    virtual std::optional<int> take(std::vector<std::byte>& record) = 0;
    // Begin a long message from memory to memory, as `exchange` does. Order: both ranks begin the long
    // messages between them in the same order. Return null, on every rank, if the transport does not do so: a
    // long message then goes in records.
    virtual std::unique_ptr<Pending> send_long(const Outgoing& message) { return (void)message, nullptr; }
    virtual std::unique_ptr<Pending> receive_long(const Incoming& message) { return (void)message, nullptr; }
  };

  virtual ~Transport() = default;

  // Returns the name of the library, for the text of errors.
  virtual std::string name() const = 0;

  // Begins all messages at once and returns without waiting for a peer. No message is empty, or is to or from
  // this rank. Requires: the memory stays as it is until `test` has returned true.
  virtual std::unique_ptr<Pending> exchange(std::span<const Outgoing> sends,
                                            std::span<const Incoming> receives) = 0;

  // Returns what carries records, if the transport does: on every rank or on none. It lives as long as the
  // transport.
  virtual Records* records() { return nullptr; }

  // Tells the other ranks, as far as they can be reached, that this one has failed. Does not wait for them.
  virtual void tell(const std::string& failure) noexcept { (void)failure; }
  // Returns what another rank has told. Called every few milliseconds of a wait.
  virtual std::optional<std::string> heard() { return {}; }

  // Frees what was made, also while an exchange is under way. Idempotent; not collective.
  virtual void close() noexcept = 0;
};

}  // namespace unisono
