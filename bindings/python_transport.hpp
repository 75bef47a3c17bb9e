// Transports that are written in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "held.hpp"
#include "unisono/transport.hpp"

namespace unisono::python {

namespace nb = nanobind;

// An exchange under way. The transport's Python code ends it once, from any thread.
class PythonExchange {
 public:
  explicit PythonExchange(std::vector<int> peers) : peers_(std::move(peers)) {}
  // Ends the exchange: all messages are complete.
  void complete() { over_.store(true, std::memory_order_release); }
  void fail(int peer, const std::string& why) { end(TransportError(peer, why)); }
  void other_length(int peer, std::size_t sent, std::size_t expected) {
    end(TransportError(peer, sent, expected));
  }
  // Notes that the messages of a peer are complete.
  void arrived(int peer);
  // Notes that a message of a peer is not complete.
  void awaits(int peer);

  bool test();
  std::vector<int> open();

 private:
  void end(TransportError error);
  std::atomic<bool> over_ = false;
  std::mutex mutex_;
  std::optional<TransportError> error_;
  std::vector<int> peers_;
};

// Records that a transport in Python carries, by its send_record(to, record).
class PythonRecords final : public Transport::Records {
 public:
  explicit PythonRecords(Held transport) : transport_(std::move(transport)) {}

  // For the transport, from any thread. arrived: a record has come. sent: the transport needs this rank no
  // more for the oldest record to a rank. fail: a peer is lost.
  void arrived(int source, std::span<const std::byte> record);
  void sent(int to);
  void fail(int peer, const std::string& why);

  std::size_t most_bytes() const override { return std::size_t{64} << 10; }
  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> data) override;
  std::size_t under_way(int to) override;
  std::optional<int> take(std::vector<std::byte>& record) override;

 private:
  static constexpr std::size_t kMostUnderWay = 16;  // to a rank

  Held transport_;
  std::mutex mutex_;
  std::deque<std::pair<int, std::vector<std::byte>>> arrived_;
  std::map<int, std::size_t> under_way_;
  std::optional<TransportError> error_;
};

// A transport over a Python object with name, exchange(exchange, sends, receives), tell(text), heard() and
// close(), and with carry(records) and send_record(to, record) if it carries records; see unisono.transport.
class PythonTransport final : public Transport {
 public:
  explicit PythonTransport(nb::object object);

  std::string name() const override { return name_; }
  std::unique_ptr<Pending> exchange(std::span<const Outgoing> sends,
                                    std::span<const Incoming> receives) override;
  Records* records() override;
  void tell(const std::string& failure) noexcept override;
  std::optional<std::string> heard() override;
  void close() noexcept override;

 private:
  Held object_;
  std::string name_;
  std::shared_ptr<PythonRecords> records_;  // null: not asked for, or there are none
};

}  // namespace unisono::python
