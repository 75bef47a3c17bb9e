// What a communicator is made of. Its members are defined by topic: communicator.cpp (itself and the public
// face), agreement.cpp (comparing calls with the peers), host_calls.cpp and gpu_calls.cpp.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "group.hpp"
#include "lane/cuda/engine.hpp"
#include "plan.hpp"
#include "request.hpp"
#include "symmetric.hpp"
#include "unisono/communicator.hpp"

namespace unisono {

class Communicator::Impl {
 public:
  Impl(Bootstrap& bootstrap, const Options& options);

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  const Plan& plan(Memory memory) const { return memory == Memory::host ? plan_ : gpu_plan_; }
  Plan& plan(Memory memory) { return memory == Memory::host ? plan_ : gpu_plan_; }
  cuda::Engine& engine() const;  // UsageError when there is none
  bool has_engine() const { return engine_ != nullptr; }
  bool check() const { return check_; }
  void set_check(bool check) { check_ = check; }
  bool closed() const { return group_.left(); }
  void close() noexcept { group_.leave(); }

  void run(Request request);
  void run_pair(Request request, int to, int from);
  void barrier();

  // This rank's part of a new allocation, and the allocation's number.
  std::pair<std::shared_ptr<Segment>, std::uint32_t> allocate(std::size_t bytes);
  std::shared_ptr<void> allocate_on_gpu(std::size_t bytes);
  std::shared_ptr<Symmetric> symmetric() const { return symmetric_; }

 private:
  // One call at a time: its place in the order of calls, and in the text of errors.
  class Turn {
   public:
    Turn(Impl& impl, Collective collective);
    ~Turn() { impl_.busy_.store(false, std::memory_order_release); }
    Turn(const Turn&) = delete;

   private:
    Impl& impl_;
  };

  // Host memory: which program, and where the buffers lie.
  void run_on_host(Request& request);
  void run_pair_on_host(Request& request, int to, int from);
  bool asks_for_places(const Request& request) const;
  Algorithm plain(const Request& request) const;
  Algorithm meet_places(Request& request);
  Place place(const byte* at, std::size_t bytes) const;
  byte* reach(const Place& place, int rank, std::size_t bytes);

  // Device memory.
  void run_on_gpu(const Request& request, int to, int from);
  void compare_places(const Request& request, bool symmetric);

  // What the ranks tell each other of their calls.
  Ticket ticket(Collective collective, const Call& call, std::uint64_t count) const;
  std::vector<Ticket> exchange(const Request& request);
  std::vector<Ticket> exchange_parts(const Request& request);
  void compare(const std::vector<Ticket>& tickets);
  void compare_pair(const Request& request, int to, int from);
  [[noreturn]] void mismatch(int a, const Ticket& of_a, int b, const Ticket& of_b);

  bool check_;
  std::size_t stream_bytes_;
  Group group_;
  Plan plan_, gpu_plan_;
  std::unique_ptr<cuda::Engine> engine_;
  std::shared_ptr<Symmetric> symmetric_ = std::make_shared<Symmetric>();
  std::vector<const byte*> inputs_;
  std::vector<byte*> outputs_;
  std::uint64_t calls_ = 0;
  std::atomic<bool> busy_ = false;
};

}  // namespace unisono
