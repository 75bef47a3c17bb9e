// The ranks of one machine, on host memory. Members are defined by topic: backend.cpp (itself), agreement.cpp
// (comparing calls with the peers), calls.cpp, and parts.cpp (calls with a size for each pair of ranks).
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/allocation.hpp"
#include "core/backend.hpp"
#include "core/plan.hpp"
#include "core/request.hpp"
#include "host/call_ways.hpp"
#include "host/group.hpp"
#include "host/mailbox.hpp"
#include "host/symmetric.hpp"
#include "lane/channel.hpp"
#include "unisono/communicator.hpp"

namespace unisono {

class LocalCommunicator : public Communicator::Impl {
 public:
  // `numbers`: as Group's.
  LocalCommunicator(Bootstrap& bootstrap, const Communicator::Options& options,
                    const std::vector<int>& numbers = {});

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  bool closed() const override { return group_.left(); }
  void close() noexcept override { group_.leave(); }
  void fail(const Failure& failure) noexcept override { group_.record(failure.kind, failure.text); }
  void raise_if_failed() override {
    if (group_.broken()) group_.check();
  }
  bool tells_before_rest() const override { return group_.alone_in_process(); }
  LocalCommunicator* machine() override { return this; }
  Group& group() { return group_; }
  // Runs a call of all ranks beside the collectives, by request.algorithm when program() runs. A direct one
  // reaches the inputs and outputs of request.args.
  void run_planned(Request& request, const std::function<void()>& program);
  const Symmetric& symmetric() const { return *symmetric_; }
  std::vector<byte*> parts_of(const void* symmetric) const override;
  std::string_view kernel_copies() const override {
    const KernelCopies copies = group_.kernel_copies();
    return copies == KernelCopies::unknown ? "none" : copies == KernelCopies::fast ? "fast" : "slow";
  }
  void set_plan(const std::vector<Plan::Entry>& entries, Level level) override {
    if (level != Level::host) return Impl::set_plan(entries, level);
    for (Plan& plan : plans_) plan.set(entries);
  }

 protected:
  Plan& plan(Memory memory) override {
    if (memory == Memory::device) refuse_gpu();
    return plans_[group_.cached()];
  }
  void set_timeout(std::optional<double> timeout_s) override { group_.set_timeout(timeout_s); }
  void run_beside(bool beside) override { group_.run_beside(beside); }
  Received do_message(const Message& message) override { return mailbox_.run(message); }
  std::shared_ptr<Work::State> do_begin(const Message& message) override {
    return mailbox_.begin(message, call_threads());
  }
  void do_run(Request& request) override;
  void do_run_pair(Request& request, int to, int from) override;
  std::shared_ptr<void> do_allocate(std::size_t bytes, Memory memory) override;
  std::shared_ptr<void> do_register(const MemoryRange& range) override;
  void do_end(Registration::State& one) override;
  AllocationAgreement<Group> begin_registration(const MemoryRange& range);

  // Marks of what ranks tell each other outside of a call's program. 0: before a call, and of allocations.
  enum : std::uint32_t { kMarkOfRegistration = 1, kMarkOfEnd = 2 };

  int number(int rank) const override { return group_.number(rank); }
  Algorithm planned(const Request& request, const Args::Part& part) override;
  // Exchanges the ranks' tickets.
  std::vector<Ticket> exchange(const Request& request);
  PacketChannel<HostThread> packets() { return PacketChannel<HostThread>(group_.lane()); }

 private:
  bool reaches_any_memory() const override { return group_.reaches_all(); }
  void leave() noexcept override { group_.leave(); }
  void enter(std::string_view what, std::uint64_t call) override {
    group_.doing(what, call);
    group_.check();
    group_.lane().mark(0);  // the mark of tickets, which travel before the call runs
    symmetric_->drop_released();
  }
  void disagree(const std::string& text) override { group_.fail(FailureKind::mismatch, text); }

  void do_barrier() override;

  // Returns this rank's part of a new allocation, and the allocation's number.
  std::pair<std::shared_ptr<Segment>, std::uint32_t> allocate_on_host(std::size_t bytes);

  // Choose the program of a call, find its buffers, run it.
  void run_on_host(Request& request);
  struct Choice {
    bool asks;           // the ranks exchange places
    host::CallWay* way;  // null: they learn nothing
  };
  Choice choose_program(Request& request);
  template <class Program>
  void run_chosen(Request& request, const Choice& choice, const Program& program);
  void run_quantised(const Request& request);
  void run_pair_on_host(Request& request, int to, int from);
  void run_parts_on_host(Request& request);
  bool asks_for_places(const Request& request, Algorithm plain) const;
  const Plan& host_plan() const { return plans_[group_.cached()]; }
  bool may_ask_kernel(const Request& request) const {
    return request.algorithm == Algorithm::automatic && is_direct(planned(request));
  }
  Algorithm planned(const Request& request) const;
  Algorithm staged(const Request& request) const {
    return Plan::staged(request.collective, size(), request.bytes());
  }
  bool meet_places(Request& request, host::CallWay* way);
  host::CallWay* way_of(const Request& request);
  Place place(const byte* at, std::size_t bytes) const;
  byte* reach(const Place& place, int rank, std::size_t bytes);
  [[noreturn]] static void refuse_direct(Algorithm algorithm);

  // A rank tells the other one of a pair where its part for it and its place for the other part lie.
  struct Offer {
    Place in, out;
    std::int32_t saves = 0;  // CallWay::next
    bool in_place = false;
    bool refused = false;  // the call names direct, and the rank's buffers are not for that
  };
  // The messages of a call by parts between this rank and another.
  struct Pair {
    Algorithm to, from;
    bool meets, learns;
    host::CallWay* way;  // null: they learn nothing
    Offer mine, theirs;  // if the pair meets
  };
  struct Times {
    Clock::time_point began, met;
  };
  void plan_pair(const Request& request, int peer, Pair& pair);
  template <class Of>
  bool choose_parts(const Request& request, const Of& of);
  Times meet_pairs(const Request& request);
  void end_pairs(const Request& request, const Times& times);
  template <class Body>
  void for_pairs(const Request& request, const Body& body);

  Group group_;
  std::shared_ptr<Symmetric> symmetric_ = std::make_shared<Symmetric>();
  Mailbox mailbox_{group_, *symmetric_, check_};
  Plan plans_[2];  // for chunks around the cache, and through it
  host::CallWays ways_;
  std::vector<host::PairWays> pairs_{static_cast<std::size_t>(size())};  // by rank
  std::vector<Pair> parts_{static_cast<std::size_t>(size())};            // by rank; of the call that runs
  std::vector<Args::Part> chosen_parts_;
  Args chosen_;
  std::vector<const byte*> inputs_;
  std::vector<byte*> outputs_;
};

}  // namespace unisono
