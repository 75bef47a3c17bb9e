// Exchanges between nodes: one wait loop over any transport, and errors that name global ranks.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/failure.hpp"
#include "nodes/topology.hpp"
#include "unisono/transport.hpp"

namespace unisono::nodes {

// Messages of one exchange. Empty ones are left out.
struct Messages {
  std::vector<Outgoing> sends;
  std::vector<Incoming> receives;
  void send(int to, const byte* data, std::size_t bytes) {
    if (bytes > 0) sends.push_back({data, bytes, to});
  }
  void receive(int from, byte* data, std::size_t bytes) {
    if (bytes > 0) receives.push_back({data, bytes, from});
  }
};

class Courier {
 public:
  // look: called every few milliseconds of a wait; what it throws ends the wait.
  Courier(const Topology& place, std::shared_ptr<Transport> transport, double timeout_s,
          std::function<void()> look)
      : place_(place), transport_(std::move(transport)), timeout_s_(timeout_s), look_(std::move(look)) {}

  // An exchange that has begun.
  class Exchange {
   public:
    Exchange() = default;
    // Waits until the exchange is complete. Throws TimeoutError past the deadline, PeerLostError if the
    // transport fails, and MismatchError if a message has another length than its receive. All name the peer.
    void wait();
    // Moves the exchange on, for work that goes on beside it.
    void poll();

   private:
    friend class Courier;
    Exchange(Courier& courier, std::unique_ptr<Transport::Pending> pending)
        : courier_(&courier), pending_(std::move(pending)) {}
    Courier* courier_ = nullptr;
    std::unique_ptr<Transport::Pending> pending_;
  };

  Exchange begin(const Messages& messages);
  const Topology& place() const { return place_; }
  void set_timeout(double timeout_s) { timeout_s_ = timeout_s; }
  Transport& transport() { return *transport_; }
  // Throws the transport's error as one with the names of both ranks.
  [[noreturn]] void failed(const TransportError& error) const;

 private:
  template <class Step>
  auto guarded(const Step& step);
  void wait(Transport::Pending& pending);
  [[noreturn]] void late(Transport::Pending& pending) const;

  const Topology& place_;
  std::shared_ptr<Transport> transport_;
  double timeout_s_;
  std::function<void()> look_;
};

}  // namespace unisono::nodes
