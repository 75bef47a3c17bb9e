// The ranks that have joined over the fabric, and their failures. The ranks may be on several machines: they
// share nothing except what they write to each other.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/failure.hpp"
#include "base/process.hpp"
#include "fabric/endpoint.hpp"
#include "fabric/ring.hpp"
#include "lane/channel.hpp"
#include "unisono/bootstrap.hpp"

namespace unisono {

class FabricGroup {
 public:
  struct Options {
    bool check;
    FabricEndpoint::Settings lane;
    std::function<void()> while_waiting;
  };
  FabricGroup(Bootstrap& bootstrap, const Options& options);
  ~FabricGroup();
  FabricGroup(const FabricGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  static int number(int rank) { return rank; }  // in the whole job, like Group::number
  FabricEndpoint& lane() { return *lane_; }

  // Begins a call named `what`. Throws the group's failure if this rank knows of one. `ended` must follow.
  void enter(std::string_view what, std::uint64_t call);
  void ended() noexcept;
  // Looks at the peers. Throws the group's failure, if any. From any thread; a call under way looks itself.
  void look_for_failure();
  // Look at the peers, and at the failures that they have told, within a call. Throw the group's failure.
  void look() {
    look(-1, 0, [] { return false; });
  }
  void heed();
  // Lets the group fail at this rank's next check or look, with the first recorded text. From any thread.
  void record(FailureKind kind, const std::string& text);
  // Fails the group and throws. Tells the peers that can be reached, which fail with the same text.
  [[noreturn]] void fail(FailureKind kind, const std::string& text);

  template <class T>
  std::vector<T> exchange(const T& mine) {
    static_assert(sizeof(T) <= FabricEndpoint::kLeastChunk, "it is one piece");
    RingChannel channel(*lane_);
    auto all = unisono::exchange(channel, mine);
    lane_->finish();
    return all;
  }

  // Calls the caller's while_waiting, between two looks of a long wait.
  void let_caller_in() {
    if (while_waiting_) while_waiting_();
  }

  // Ends this rank's communication, from any thread. A call that waits ends by an error. The peers are told
  // when no call is under way.
  void leave() noexcept;
  bool left() const { return left_; }
  // Sets the deadline of waits; none: that of the constructor.
  void set_timeout(std::optional<double> timeout_s) {
    timeout_s_ = timeout_s.value_or(usual_timeout_s_);
    lane_->set_timeout(timeout_s_);
  }
  int ranks_here() const { return here_; }  // ranks on this machine
  bool inherited() const { return forks_ != forks(); }

 private:
  void join(Bootstrap& bootstrap, const Options& options);
  void check();
  void look(int peer, double elapsed_s, const std::function<bool()>& arrived);
  [[noreturn]] void late(int peer);
  void broken(int peer, const std::string& why);
  [[noreturn]] void unreachable(int peer, const std::string& why);
  void heed(int rank);  // throws the failure that a peer has told, if any
  void settle(double seconds) noexcept;
  std::string stuck(double seconds);  // the watchdog's verdict
  bool gone_for_good(int rank, int awaited);
  std::string where() const;
  void bury(bool this_process_too) const noexcept;  // removes the files of processes that have died
  std::string who(int rank) const;

  int rank_, size_, here_ = 0;
  const double usual_timeout_s_;
  std::atomic<double> timeout_s_;  // of the call that runs; the watchdog reads it
  std::function<void()> while_waiting_;
  std::atomic<bool> left_ = false;
  std::atomic<bool> inside_ = false;  // whether a thread uses the lane, in a call or between two
  bool farewell_ = false;             // whether the peers have been told that this rank leaves
  unsigned forks_ = forks();
  std::string_view doing_ = "init";
  std::uint64_t call_ = 0;
  std::optional<Failure> failure_;
  std::optional<Failure> recorded_;  // by another thread
  std::atomic<bool> recording_ = false, is_recorded_ = false;
  std::vector<std::optional<Process>> processes_;       // of this machine's ranks
  std::vector<std::optional<Clock::time_point>> gone_;  // when a rank was first seen to be gone
  Clock::time_point probed_{};
  struct Suspicion {
    Clock::time_point since;
    int peer;  // negative: not known
    std::string why;
  };
  std::optional<Suspicion> suspicion_;  // a write to a peer has failed
  std::unique_ptr<FabricEndpoint> lane_;
  std::optional<int> first_dead_;  // as the watchdog has seen
  std::unique_ptr<fabric::Watchdog> watchdog_;
};

}  // namespace unisono
