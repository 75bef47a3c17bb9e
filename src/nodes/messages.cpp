// Messages with tags between the ranks of several nodes: a mailbox of all ranks, over the node's shared
// memory and the transport's records.
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "host/backend.hpp"
#include "nodes/backend.hpp"

namespace unisono::nodes {

// As `guarded`, outside of a call. What is no Error (no memory, an interrupt) leaves this rank out of step.
template <class Body>
auto NodesCommunicator::for_message(const Body& body) {
  try {
    return guarded(body);
  } catch (const Error&) { throw; } catch (...) {
    leave();
    throw;
  }
}

class NodesCommunicator::Abroad final : public Mailbox::Abroad {
 public:
  Abroad(NodesCommunicator& of, Transport::Records& records) : of_(of), records_(records) {
    rank = of.rank();
    timeout_s = of.timeout_s_;
    most_bytes = records.most_bytes();
    for (int r = 0; r < of.size(); ++r) group_number.push_back(of.place_.local_number(r));
  }
  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> data) override {
    return named([&] { return records_.send(to, head, data); });
  }
  std::size_t under_way(int to) override {
    return named([&] { return records_.under_way(to); });
  }
  std::optional<int> take(std::vector<std::byte>& record) override {
    return named([&] { return records_.take(record); });
  }
  std::unique_ptr<Transport::Pending> send_long(const Outgoing& message) override {
    return named([&] { return records_.send_long(message); });
  }
  std::unique_ptr<Transport::Pending> receive_long(const Incoming& message) override {
    return named([&] { return records_.receive_long(message); });
  }
  bool test(Transport::Pending& pending) override {
    return named([&] { return pending.test(); });
  }
  void hear() override { of_.hear(); }
  void failed(const std::exception_ptr& error) override {
    try {
      of_.for_message([&] { std::rethrow_exception(error); });
    } catch (...) {  // NOLINT(bugprone-empty-catch): those who wait for the letters get it
    }
  }

 private:
  template <class Step>
  std::invoke_result_t<Step> named(const Step& step) {
    try {
      return step();
    } catch (const TransportError& error) { of_.host_->courier.failed(error); }
  }

  NodesCommunicator& of_;
  Transport::Records& records_;
};

void NodesCommunicator::make_mailbox() {
  Transport::Records* const records = transport_->records();
  if (!records) return;
  LocalCommunicator& host = *local_->machine();
  mailbox_ = std::make_unique<Mailbox>(host.group(), host.symmetric(), check_,
                                       std::make_unique<Abroad>(*this, *records));
}

Received NodesCommunicator::do_message(const Message& message) {
  if (!mailbox_) return Impl::do_message(message);
  if (failed_) raise_if_failed();
  return for_message([&] { return mailbox_->run(message); });
}

std::shared_ptr<Work::State> NodesCommunicator::do_begin(const Message& message) {
  if (!mailbox_) return Impl::do_begin(message);
  if (failed_) raise_if_failed();
  return for_message([&] { return mailbox_->begin(message, call_threads()); });
}

}  // namespace unisono::nodes
