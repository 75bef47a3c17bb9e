// Messages between GPUs of different nodes: NCCL, on the stream of the call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "core/gpu_space.hpp"
#include "nodes/nccl.hpp"
#include "unisono/bootstrap.hpp"
#include "unisono/transport.hpp"

namespace unisono::nodes {

// An exchange is one group of sends and receives of bytes. It is complete once it is enqueued.
//
// Deadline: a thread of the transport watches what is under way, except what graphs have captured. Past the
// deadline the thread aborts NCCL, so that a wait for the stream ends, by CUDA itself too.
// Errors: PeerLostError and TimeoutError with their whole text. They name the ranks that the calls since the
// last `synchronize` have waited for.
class NcclTransport final : public Transport {
 public:
  struct Setting {
    Bootstrap& bootstrap;                 // of all ranks, whose numbers the messages' are; used at first only
    GpuSpace& space;                      // of the calls; it outlives the transport
    double timeout_s;                     // of every wait
    std::function<std::string(int)> who;  // a rank's name in errors
    std::function<void()> look;           // throws what has gone wrong within the node; a wait calls it
  };

  // Collective.
  // Throws UsageError if a rank has no NCCL, TimeoutError if a rank does not join within the deadline,
  // ResourceError if NCCL fails.
  explicit NcclTransport(const Setting& setting);
  ~NcclTransport() override;
  NcclTransport(const NcclTransport&) = delete;

  std::string name() const override { return "NCCL"; }
  std::unique_ptr<Pending> exchange(std::span<const Outgoing> sends,
                                    std::span<const Incoming> receives) override;

  // Waits for a stream. Throws TimeoutError past the deadline, and has aborted NCCL then.
  void synchronize(void* stream);

  // Lets what is enqueued end, unless the node has failed or the deadline passes. Then aborts, since NCCL's
  // orderly end is collective: a call that waits in NCCL for a peer comes back.
  void close() noexcept override;

 private:
  // An exchange that no graph captures, between two points of its stream. The second is there when NCCL has
  // enqueued it.
  struct UnderWay {
    std::uint64_t number;
    std::unique_ptr<GpuSpace::Mark> begun, ended;
  };

  nccl::UniqueId meet() const;
  nccl::Comm join(const nccl::UniqueId& id) const;
  void enqueue(std::span<const Outgoing> sends, std::span<const Incoming> receives) const;
  // Returns whether done() has become true before the deadline. What look() throws ends the wait.
  bool within_deadline(const std::function<bool()>& done, const std::function<void()>& look) const;
  // late: past the deadline, as all later calls say.
  void abort(bool late) noexcept;
  void raise_if_late() const;
  std::string names(const std::set<int>& ranks) const;
  void watch() noexcept;
  void forget_ended();  // under mutex_

  const Setting setting_;
  const int pid_, rank_, size_;
  std::set<int> spoken_to_;  // since the last `synchronize`
  std::uint64_t exchanges_ = 0;

  std::mutex aborting_, closing_;
  std::atomic<nccl::Comm> comm_ = nullptr;  // null: aborted
  std::atomic<bool> late_ = false;

  std::mutex mutex_;  // of what follows
  std::condition_variable ending_;
  bool closed_ = false, watching_ = true;
  std::deque<UnderWay> under_way_;
  std::thread watcher_;
};

}  // namespace unisono::nodes
