// The ranks of several nodes: within a node by its own communicator, between nodes by a transport. Members
// are defined by topic: backend.cpp (itself), agreement.cpp (what all ranks agree on first) and messages.cpp
// (tags).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/failure.hpp"
#include "core/allocation.hpp"
#include "core/backend.hpp"
#include "core/gpu_space.hpp"
#include "host/mailbox.hpp"
#include "host/segment.hpp"
#include "nodes/courier.hpp"
#include "nodes/moves.hpp"
#include "nodes/sums.hpp"
#include "nodes/topology.hpp"
#include "nodes/transport_nccl.hpp"

namespace unisono::nodes {

// Makes the transport that Options or UNISONO_TRANSPORT names. Collective.
std::shared_ptr<Transport> make_transport(Bootstrap& bootstrap, const Communicator::Options& options);

class NodesCommunicator final : public Communicator::Impl {
 public:
  NodesCommunicator(Bootstrap& bootstrap, Topology place, const Communicator::Options& options,
                    const Limits& limits = {});
  ~NodesCommunicator() override;

  int rank() const override { return place_.rank; }
  int size() const override { return place_.size(); }
  std::vector<std::vector<int>> nodes() const override { return place_.nodes; }
  std::string transport() const override { return transport_->name(); }
  std::optional<int> device() const override { return local_->device(); }
  bool peer_access() const override { return local_->peer_access(); }
  bool nvlink() const override { return local_->nvlink(); }
  std::string_view card() const override { return local_->card(); }
  void* last_stream() const override { return local_->last_stream(); }
  cuda::Engine* gpu() override { return local_->gpu(); }
  Algorithm choose(Collective collective, std::size_t bytes, bool symmetric, Memory memory,
                   bool in_place) override;
  int sms(Collective collective, std::size_t bytes, bool symmetric, Algorithm algorithm,
          bool in_place) override;
  std::string_view kernel_copies() const override { return local_->kernel_copies(); }
  void set_shape(const std::optional<Shape>& shape) override { local_->set_shape(shape); }
  void set_plan(const std::vector<Plan::Entry>& entries, Level level) override {
    if (level == Level::nodes) plan_.set(entries);
    else local_->set_plan(entries, level);
  }
  void synchronize(void* stream) override;
  bool closed() const override { return closed_; }
  void close() noexcept override;
  void fail(const Failure& failure) noexcept override;
  void raise_if_failed() override;
  std::unique_ptr<Impl::Exchange> begin_exchange(std::span<const Outgoing> sends,
                                                 std::span<const Incoming> receives) override;
  void meet_node() override;
  std::vector<byte*> parts_of(const void* symmetric) const override { return local_->parts_of(symmetric); }

 private:
  Plan& plan(Memory) override { return plan_; }
  std::vector<Algorithm> algorithms(Collective collective, Memory) const override {
    return Plan::algorithms(collective, Level::nodes);
  }

  // The memory of a call's data, and what moves and sums the data there.
  struct Carrier {
    Carrier(NodesCommunicator& of, std::shared_ptr<Transport> transport, std::unique_ptr<Space> where);
    std::unique_ptr<Space> space;
    Courier courier;
    Moves moves;
    Sums sums;
  };

  void set_timeout(std::optional<double> timeout_s) override;
  void set_gpu_timeout(double timeout_s) override;
  void run_beside(bool beside) override { local_->run_beside(beside); }
  Received do_message(const Message& message) override;
  std::shared_ptr<Work::State> do_begin(const Message& message) override;
  void do_run(Request& request) override;
  void do_run_pair(Request& request, int to, int from) override;
  void do_barrier() override;
  std::shared_ptr<void> do_allocate(std::size_t bytes, Memory memory) override;
  std::shared_ptr<void> do_register(const MemoryRange& range) override;
  void do_end(Registration::State& one) override;

  void leave() noexcept override {
    abandoned_ = true;
    close();
  }
  void enter(std::string_view what, std::uint64_t call) override;
  void disagree(const std::string& text) override { raise({FailureKind::mismatch, text}); }

  void run_by(Carrier& carrier, const Request& request);
  class OnStream;  // a call on the GPU's memory
  class Abroad;    // the other nodes' ranks, for messages with tags
  class BegunExchange;
  Algorithm chosen(const Request& request) const;
  Algorithm planned_algorithm(Collective collective, std::size_t bytes, double wide, int root) const;
  void compare_all(const Ticket& mine);
  void compare_calls(const Request& request);
  void compare_parts(const Request& request);
  void compare_ends(const Request& request, int to, int from);
  Carrier& carrier(Memory memory);
  // Runs the body of a call. An error in it fails the communicator on every rank that can be reached.
  template <class Body>
  auto guarded(const Body& body) {
    try {
      return body();
    } catch (const UsageError&) { throw; } catch (const Refused&) {
      throw;
    } catch (const Error& error) {
      fail_by(error);
      throw;
    }
  }
  void fail_by(const Error& error);  // throws what has failed the communicator first
  template <class Body>
  auto for_message(const Body& body);
  void make_mailbox();
  // Called every few milliseconds of a wait between nodes.
  void look();
  void hear();
  Failure cause_of(const Error& error);
  // Returns everyone's `mine`, in rank order: of a trivially copyable type.
  template <class T>
  std::vector<T> everyones(const T& mine);
  struct Everyone;

  const Topology place_;
  const Limits limits_;
  const double timeout_s_;
  const std::function<void()> while_waiting_;
  std::string doing_ = "init";
  std::atomic<bool> closed_ = false;
  bool abandoned_ = false;      // closed in the middle of a call
  mutable std::mutex failing_;  // fail() comes from any thread
  std::optional<Failure> failure_;
  std::atomic<bool> failed_ = false;
  std::unique_ptr<Communicator::Impl> local_;
  std::shared_ptr<Transport> transport_;
  std::unique_ptr<Carrier> host_;
  std::unique_ptr<Carrier> gpu_;  // null: no GPU
  GpuSpace* gpu_space_ = nullptr;
  std::shared_ptr<NcclTransport> nccl_;  // before gpu_, whose space it uses, in the order of destruction
  Plan plan_ = Plan::of_nodes();
  std::unique_ptr<Mailbox> mailbox_;  // null: the transport has no records
};

}  // namespace unisono::nodes
