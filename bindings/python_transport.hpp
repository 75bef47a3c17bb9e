// Transports that are written in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
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

// A transport over a Python object with name, exchange(exchange, sends, receives), tell(text), heard() and
// close(); see unisono.transport.
class PythonTransport final : public Transport {
 public:
  explicit PythonTransport(nb::object object);

  std::string name() const override { return name_; }
  std::unique_ptr<Pending> exchange(std::span<const Outgoing> sends,
                                    std::span<const Incoming> receives) override;
  void tell(const std::string& failure) noexcept override;
  std::optional<std::string> heard() override;
  void close() noexcept override;

 private:
  Held object_;
  std::string name_;
};

}  // namespace unisono::python
