// The ranks of one machine that have joined: their shared memory, their lane, and their failures.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/failure.hpp"
#include "base/process.hpp"
#include "base/traits.hpp"
#include "host/host_thread.hpp"
#include "host/pages.hpp"
#include "host/segment.hpp"
#include "lane/channel.hpp"
#include "unisono/bootstrap.hpp"
#include "unisono/error.hpp"

namespace unisono {

// How chunks go into a peer's ring.
enum class CacheWay : std::uint8_t { unknown, through, around };  // the cache

// How long the kernel's copy from another process takes, beside two copies through a chunk.
enum class KernelCopies : std::uint8_t { unknown, slow, fast };

class Group {
 public:
  // check: whether this rank's calls begin with a comparison, as all ranks' do or none.
  // numbers: the rank in the whole job of each rank of this group, for the text of errors. Empty: the same.
  Group(Bootstrap& bootstrap, double timeout_s, bool check, std::function<void()> while_waiting,
        std::vector<int> numbers = {});
  ~Group();
  Group(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Returns the rank in the whole job of a rank of this group.
  int number(int rank) const { return numbers_.empty() ? rank : numbers_.at(static_cast<std::size_t>(rank)); }
  HostThread& lane() { return *lane_; }
  int ranks_a_core() const { return ranks_a_core_; }  // ranks that take turns on a core
  // Returns the bytes from which outputs go around the cache: they would not stay there until they are read.
  std::size_t stream_bytes() const { return stream_bytes_; }
  bool cached() const { return cached_; }  // whether chunks stay in the cache; the same on every rank
  // Returns whether pieces go by cells, as this group has found. From any thread.
  bool uses_cells() const { return cells_.load(std::memory_order_relaxed); }
  // Counts what a call of all ranks will move, and sees to the rings before its first chunk. Requires: the
  // same on every rank. Throws ResourceError on every rank, which may go on, if there is no room for rings.
  void will_move(std::size_t bytes, Algorithm by) {
    moved_ += kOfACall + bytes * (cached_ && bytes >= kLarge ? kSooner : 1);
    if (!is_packets(by) || moved_ >= kTimedFor) see_to_chunks(by);  // packets need no chunks
  }

  // Return, alike on every rank, whether ranks reach each other's plain pointers: as they are, in one
  // process; or also as far addresses, if the kernel lets every rank copy from and to every other's memory.
  bool one_process() const { return one_process_; }
  bool reaches_all() const { return one_process_ || far_; }
  // Returns how long the kernel's copies between these processes take; unknown: there are none. The same on
  // every rank, and for as long as the group lives.
  KernelCopies kernel_copies() const { return kernel_copies_; }
  // Returns whether the kernel had better copy a message with a tag from that memory of this process than
  // parts carry it.
  bool kernel_suits(const void* at, std::size_t bytes) const {
    return kernel_copies_ == KernelCopies::fast || pages_.huge(at, bytes);
  }
  // Returns whether ranks learn which way large calls go, by the kernel's copies or through chunks: if
  // they have a core each.
  bool learns_ways() const { return kernel_copies_ != KernelCopies::unknown && ranks_a_core_ == 1; }
  // Returns whether copies of what another core has take less time abreast (Kernels::copy_abreast).
  static bool copies_abreast() { return abreast_; }
  byte* reach(int rank, std::uint64_t address) const {
    return processes_[static_cast<std::size_t>(rank)].own() ? reinterpret_cast<byte*>(address)
                                                            : host::far_address(rank, address);
  }

  // Returns whether a rank is in this process, so that its pointers are this rank's.
  bool near(int rank) const { return processes_[static_cast<std::size_t>(rank)].own(); }
  bool alone_in_process() const {
    return std::ranges::count_if(processes_, [](const Process& one) { return one.own(); }) == 1;
  }
  // Copies from or to an address that `reach` has returned. Returns whether the kernel has done so. From any
  // thread.
  bool copy(byte* to, const byte* from, std::size_t bytes) const;

  // Sets the deadline of the lane's waits; none: that of the constructor.
  void set_timeout(std::optional<double> timeout_s) {
    timeout_s_ = timeout_s.value_or(usual_timeout_s_);
    lane_->set_timeout(timeout_s_);
  }
  // Sets whether the call that runs is beside its rank's own work (HostThread::run_beside).
  void run_beside(bool beside) { lane_->run_beside(beside); }
  double usual_timeout_s() const { return usual_timeout_s_; }

  // What messages with tags need of the ranks (host/mailbox.hpp). From any thread.
  byte* mail(int rank) const { return base(rank) + mail_at_; }
  byte* mail_data(int rank) const { return base(rank) + mail_data_at_; }
  // Takes memory for a part of a rank's segment that has none until a pair of ranks needs it. Fails the group
  // if there is none.
  void fill(int owner, const byte* part, std::size_t bytes);
  // Fails the group if there is no room for a ring whose first part is taken next, unless all ranks have
  // agreed that there is (will_move).
  void begin_ring(std::size_t bytes);
  bool dead(int rank) const { return processes_[static_cast<std::size_t>(rank)].dead(); }
  bool departed(int rank) const { return board(rank).departed.load(std::memory_order_acquire) != 0; }
  std::string name(int rank) const;                                  // "rank 3"
  std::string who(int rank) const;                                   // "rank 3 (process 1234)"
  std::string death_of(int rank, const std::string& noticed) const;  // noticed: where, or by whom
  const host::Patience& patience() const { return patience_; }

  // Moves this thread, which waits for a peer, to another core if that rank was last seen on this one.
  void part_from(int peer);
  // Sets what is called before a wait of the lane gives its core away, once in each.
  void set_before_rest(std::function<void()> call) { before_rest_ = std::move(call); }

  // Begins a call. Its name and number are for the text of errors.
  void doing(std::string_view what, std::uint64_t call) {
    doing_ = what;
    call_ = call;
    beat();
  }

  // Throws the failure of the group, if there is one. Cheap.
  void check() const {
    if (failed()) raise_failure();
  }
  bool failed() const { return board(0).failure.stage.load(std::memory_order_acquire) != 0; }

  // Fails the group on every rank, and throws. The first failure is everyone's.
  [[noreturn]] void fail(FailureKind kind, const std::string& text);

  // Does the same without throwing, for threads that make no call.
  void record(FailureKind kind, const std::string& text);

  // Returns everyone's `mine`, in rank order, over packets.
  template <class T>
  std::vector<T> exchange(const T& mine) {
    PacketChannel<HostThread> channel(*lane_);
    return unisono::exchange(channel, mine);
  }

  // Returns whether the group has failed. Fails it if it has lost a rank. From any thread.
  bool broken();

  // Calls the caller's while_waiting: between two looks of a long wait, also one outside the lane.
  void let_caller_in() {
    if (while_waiting_) while_waiting_();
  }

  // Tells the peers that this rank will not communicate any more.
  void leave() noexcept;
  bool left() const { return left_; }

  // Returns whether this process was forked from the rank: it has the rank's memory, but must not act for it.
  bool inherited() const { return forks_ != forks(); }

 private:
  // The head of each rank's segment.
  struct SharedFailure {
    std::atomic<std::uint32_t> stage;  // 0: none, 1: being written, 2: readable
    FailureKind kind;
    char text[1000];
  };
  struct Board {
    std::atomic<std::uint32_t> departed;
    SharedFailure failure;  // used in rank 0's board only; every rank reads its stage at each call
    // Raised as each call begins, and at each look of a wait. On a cache line of its own: the store would
    // otherwise take `failure` from the other ranks' caches.
    alignas(128) std::atomic<std::uint32_t> beats;
    std::atomic<int> core;  // on which the rank began its last call, or its last long wait
  };

  byte* base(int rank) const { return segments_[static_cast<std::size_t>(rank)]->data(); }
  Board& board(int rank) const { return *reinterpret_cast<Board*>(base(rank)); }
  struct PieceTimes {  // microseconds
    double through = 0, around = 0, cells = 0, kernel = 0;
  };
  // due: chunks go as in earlier groups of these processes, until calls have moved some. fixed: as the user
  // says.
  enum class Timing : std::uint8_t { due, done, fixed };
  // Chunks are timed again after so many bytes: a virtual machine's cores may have come nearer, or gone
  // apart. Large calls count more while chunks go through the cache. Between cores that have gone apart they
  // take up to five times as long so, and to time the way takes less than around the cache.
  static constexpr std::size_t kTimedFor = std::size_t{256} << 20, kOfACall = 4096;
  static constexpr std::size_t kLarge = std::size_t{64} << 10, kSooner = 4;
  void see_to_chunks(Algorithm by);  // of will_move
  void choose_chunks(bool first, bool looks_at_kernel = false);
  PieceTimes time_chunks(int rounds);
  void choose_large();
  std::array<double, 2> time_large(const std::function<void(bool)>& set, int before);
  double time_pieces(std::size_t bytes, int rounds, int before);
  double time_kernel();
  std::size_t measured_bytes() const;  // of a piece that is timed
  [[noreturn]] void raise_failure() const;
  void interrupted(int peer, const std::function<bool()>& arrived);
  [[noreturn]] void unreachable(int rank, int error);
  void late(int peer, Slot slot, std::uint32_t expected, std::uint32_t seen);
  void beat() {
    board(rank_).core.store(host::current_core(), std::memory_order_relaxed);
    board(rank_).beats.store(++beats_, std::memory_order_relaxed);
  }
  // Returns the ranks that neither wait in a call nor begin one, after a look at them that lasts
  // kMostCounted.
  std::vector<int> absent();
  void differs(int peer);
  void take_memory(const std::function<void()>& step);
  std::string where() const;

  int rank_, size_;
  std::vector<int> numbers_;
  const double usual_timeout_s_;
  double timeout_s_;  // of the call that runs
  host::Patience patience_;
  std::size_t mail_at_ = 0, mail_data_at_ = 0;
  std::function<void()> while_waiting_, before_rest_;
  std::atomic<bool> left_ = false;
  unsigned forks_ = forks();
  std::string_view doing_ = "init";
  std::uint64_t call_ = 0;
  std::uint32_t beats_ = 0;
  std::size_t stream_bytes_;
  bool one_process_ = true, far_ = false, cached_ = true;
  Timing timing_ = Timing::due;
  bool large_chosen_ = false;                // between near cores
  std::atomic<bool> cells_ = true;           // pieces go by cells
  static std::atomic<CacheWay> measured_;    // by the last group of this process that has timed chunks
  static std::atomic<bool> measured_cells_;  // the same
  KernelCopies kernel_copies_ = KernelCopies::unknown;
  static std::atomic<KernelCopies> found_;  // by the first group of this process that has looked
  static std::atomic<bool> abreast_;        // by the last group that has timed copies
  std::size_t moved_ = 0;                   // bytes, since chunks were timed
  std::size_t ring_bytes_ = 0;  // of a rank's rings, until ranks agree that there is room for them
  int ranks_a_core_ = 1;
  host::Pages pages_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<Process> processes_;
  std::unique_ptr<HostThread> lane_;
};

}  // namespace unisono
