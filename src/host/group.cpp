#include "host/group.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>

#include "base/deadline.hpp"
#include "base/env.hpp"
#include "base/text.hpp"
#include "core/greetings.hpp"
#include "host/caches.hpp"
#include "host/mail_ring.hpp"

namespace unisono {
namespace {

constexpr int kMostRanks = 1024;
constexpr std::size_t kMostNamed = 8;  // ranks in the text of a failure, which has 1000 bytes
constexpr std::uint32_t kVersion = 9;  // of the memory layout and of Hello

CacheWay asked_way() {
  const auto& asked = env().stream_chunks;
  return !asked ? CacheWay::unknown : *asked ? CacheWay::around : CacheWay::through;
}

// A rank's greeting at the bootstrap. Every field comes from outside and is checked.
struct Hello {
  char magic[8] = {'u', 'n', 'i', 's', 'o', 'n', 'o', '\0'};
  std::uint32_t version = kVersion;
  std::int32_t rank = 0, size = 0;
  std::uint32_t check = 0;    // whether the rank compares calls, as all do or none
  std::uint64_t machine = 0;  // boot and PID namespace: ranks that differ cannot share memory
  std::uint64_t chunk_bytes = 0;
  std::uint64_t core_cache = 0;  // bytes of its second-level cache, by which all ranks fit their rings
  Segment::Handle segment;
  std::uint64_t nonce_at = 0;  // address of the segment's nonce in the rank's process
  CacheWay asked = asked_way(), measured = CacheWay::unknown;  // by the user, by an earlier group
  KernelCopies found = KernelCopies::unknown;                  // by an earlier group
  Cores cores;
};

// Returns the bytes of a chunk: the chunks of all pairs of a rank take at most about 32 MiB.
std::size_t chunk_bytes_for(int ranks) {
  if (env().chunk_bytes) return std::max(round_up(env().chunk_bytes, kAlign), 2 * kAlign);
  const std::size_t share = (std::size_t{32} << 20) / HostThread::kChunks / static_cast<std::size_t>(ranks);
  return std::clamp(share / 4096 * 4096, std::size_t{4096}, std::size_t{65536});
}

// Returns the bytes from which outputs go around a third-level cache of so many bytes; 0: unknown. Below, it
// still has them when their caller reads them: those of two ranks fill it with half of its size each, and one
// rank alone has the border of two. Larger outputs take less around it, even of a cache with room for them
// (docs/notes/host-rings.md).
std::size_t default_stream_bytes(std::size_t cache, int ranks) {
  constexpr std::size_t kMostKept = std::size_t{32} << 20;
  return cache > 0 ? std::min(cache / (ranks <= 2 ? 2 : 4), kMostKept) : std::size_t{4} << 20;
}

Hello read(const std::string& bytes, int rank, const Hello& mine, const std::string& who) {
  Hello hello;
  if (bytes.size() != sizeof hello)
    throw UsageError(who + " sent another version's greeting at the bootstrap (" +
                     std::to_string(bytes.size()) +
                     " bytes): start every rank with the same version of Unisono.");
  std::memcpy(&hello, bytes.data(), sizeof hello);
  if (std::memcmp(hello.magic, mine.magic, sizeof hello.magic) != 0 || hello.version != mine.version)
    throw UsageError(who +
                     " sent another version's greeting at the bootstrap: start every rank with the "
                     "same version of Unisono.");
  if (hello.rank != rank)
    throw UsageError("two ranks are numbered " + std::to_string(hello.rank) +
                     ": give each its own number below the size.");
  if (hello.size != mine.size)
    throw UsageError(who + " counts " + std::to_string(hello.size) + " ranks, this one " +
                     std::to_string(mine.size) + ": start them with the same size.");
  if (hello.machine != mine.machine)
    throw UsageError(
        who +
        " runs on another machine or in another container: the host lane joins ranks that share one "
        "machine and one PID namespace.");
  if (hello.chunk_bytes != mine.chunk_bytes)
    throw UsageError(who + " has another UNISONO_CHUNK_BYTES: set it the same on every rank.");
  if (hello.check != mine.check)
    throw UsageError((hello.check ? who + " checks" : who + " does not check") +
                     " its calls, unlike this one: give check=, or UNISONO_CHECK, the same on every rank.");
  return hello;
}

}  // namespace

Group::Group(Bootstrap& bootstrap, double timeout_s, bool check, std::function<void()> while_waiting,
             std::vector<int> numbers)
    : rank_(bootstrap.rank()),
      size_(bootstrap.size()),
      numbers_(std::move(numbers)),
      usual_timeout_s_(timeout_s),
      timeout_s_(timeout_s),
      while_waiting_(std::move(while_waiting)),
      stream_bytes_(env().stream_bytes ? env().stream_bytes
                                       : default_stream_bytes(host::cache_bytes(3), size_)) {
  check_rank(rank_, size_, kMostRanks);
  if (!numbers_.empty() && numbers_.size() != static_cast<std::size_t>(size_))
    throw UsageError("there are " + std::to_string(numbers_.size()) + " numbers for " +
                     std::to_string(size_) + " ranks: give each rank its number in the whole job.");
  mail_at_ = sizeof(Board);
  HostThread::Layout layout(size_, chunk_bytes_for(size_), mail_at_ + MailRing::head_bytes(size_));
  mail_data_at_ = layout.bytes;
  const std::size_t bytes = layout.bytes + MailRing::rings_bytes(size_), now = layout.packets;
  auto own = Segment::create(bytes, now);
  Hello mine;
  mine.rank = rank_;
  mine.size = size_;
  mine.machine = this_machine();
  mine.check = check;
  mine.chunk_bytes = layout.chunk_bytes;
  const std::size_t own_cache = host::cache_bytes(2);
  mine.core_cache = own_cache > 0 ? own_cache : HostThread::Layout::kMostRings;
  mine.segment = own->handle();
  mine.nonce_at = reinterpret_cast<std::uint64_t>(&own->nonce());
  mine.cores = Cores::of_this_process();
  mine.measured = measured_;
  mine.found = found_;
  const auto greetings = greet(bootstrap, std::string(reinterpret_cast<const char*>(&mine), sizeof mine));

  bool far = env().far;
  std::vector<int> pids;
  Cores cores;
  std::uint64_t least_cache = mine.core_cache;  // cores of one machine may differ
  std::set<std::uint64_t> segments;
  bool measured_by_all = true, found_by_all = true;
  int around = 0;  // ranks that have measured that this way pays
  int fast = 0;    // ranks that have found the kernel's copies so
  for (int r = 0; r < size_; ++r) {
    const Hello hello = read(greetings[static_cast<std::size_t>(r)], r, mine, name(r));
    if (!segments.insert(hello.segment.nonce).second)
      throw UsageError("two ranks announce the same memory: give each rank its own number.");
    segments_.push_back(r == rank_ ? own : Segment::open(hello.segment, bytes, now));
    const bool thread = hello.segment.pid == ::getpid();
    std::uint64_t nonce = 0;
    far = far && (thread || (host::Far::try_copy(host::Way::read, hello.segment.pid, hello.nonce_at, &nonce,
                                                 sizeof nonce) &&
                             nonce == hello.segment.nonce));
    one_process_ = one_process_ && thread;
    processes_.emplace_back(hello.segment.pid);
    pids.push_back(hello.segment.pid);
    cores.add(hello.cores);
    least_cache = std::min(least_cache, hello.core_cache);
    measured_by_all = measured_by_all && hello.measured != CacheWay::unknown;
    around += hello.measured == CacheWay::around;
    found_by_all = found_by_all && hello.found != KernelCopies::unknown;
    fast += hello.found == KernelCopies::fast;
    if (hello.asked == CacheWay::unknown) continue;
    cached_ = cached_ && hello.asked == CacheWay::through;
    timing_ = Timing::fixed;
  }
  if (timing_ == Timing::due) cached_ = 2 * around <= size_;
  cells_ = timing_ == Timing::due ? measured_cells_.load() : cached_;
  layout.fit_rings(least_cache);
  ring_bytes_ = layout.own_ring_bytes + static_cast<std::size_t>(size_ - 1) * layout.ring_bytes +
                layout.num_cells * layout.cell_bytes;

  host::Patience& patience = patience_;
  const int known = std::max(cores.count(), 1);
  ranks_a_core_ = (size_ + known - 1) / known;
  patience.crowded = ranks_a_core_ > 1;
  patience.spins = env().spins >= 0 ? env().spins : patience.crowded ? 20 : 1000;
  if (patience.crowded) patience.yielding = host::kYieldingCrowded;
  patience.timeout = std::chrono::duration<double>(timeout_s);
  lane_ = std::make_unique<HostThread>(
      rank_, layout, segments_, host::Far(pids, [this](int rank, int error) { unreachable(rank, error); }),
      patience,
      HostThread::Watch{
          [this](int peer, const std::function<bool()>& arrived) { interrupted(peer, arrived); },
          [this](int peer, Slot slot, std::uint32_t expected, std::uint32_t seen) {
            late(peer, slot, expected, seen);
          },
          [this](int peer) { differs(peer); },
          [this](int owner, const byte* part, std::size_t count) { fill(owner, part, count); },
          [this](std::size_t count) { begin_ring(count); },
          [this](int peer) {
            if (before_rest_) before_rest_();
            part_from(peer);
          }});
  lane_->stream_chunks(!cached_);
  lane_->use_cells(uses_cells());
  lane_->copy_abreast(abreast_);
  // Also keeps every rank until all have mapped all memory: a rank's own descriptors are needed until then.
  far_ = true;
  for (const std::string& reach : bootstrap.all_gather(far ? "far" : "near")) far_ = far_ && reach == "far";
  const bool by_kernel = far_ && !one_process_;
  if (by_kernel && found_by_all) kernel_copies_ = 2 * fast > size_ ? KernelCopies::fast : KernelCopies::slow;
  // Calls of two ranks never time chunks. So the first group of a process times them when its ranks meet. It
  // looks at the kernel's copies too, once for all later groups: plans do not change while a program runs.
  const bool looks = by_kernel && !found_by_all;
  if (looks || (size_ > 1 && timing_ == Timing::due && !measured_by_all)) choose_chunks(true, looks);
}

void Group::fill(int owner, const byte* part, std::size_t bytes) {
  take_memory([&] { segments_[static_cast<std::size_t>(owner)]->fill(part, bytes); });
}

void Group::begin_ring(std::size_t bytes) {
  if (ring_bytes_ > 0) take_memory([&] { check_room(bytes); });
}

void Group::take_memory(const std::function<void()>& step) {
  try {
    step();
  } catch (const ResourceError& error) {
    fail(FailureKind::resource,
         name(rank_) + " has no memory for what it shares with the other ranks: " + error.what());
  }
}

Group::~Group() { leave(); }

bool Group::copy(byte* to, const byte* from, std::size_t bytes) const {
  const auto by_kernel = [&](host::Way way, const byte* far, void* near) {
    const int pid = processes_[static_cast<std::size_t>(host::rank_of(far))].pid();
    return host::Far::try_copy(way, pid, host::address_of(far), near, bytes);
  };
  if (host::is_far(from)) return by_kernel(host::Way::read, from, to);
  if (host::is_far(to)) return by_kernel(host::Way::write, to, const_cast<byte*>(from));
  std::memmove(to, from, bytes);
  return true;
}

void Group::leave() noexcept {
  left_ = true;
  if (inherited()) return;
  board(rank_).departed.store(1, std::memory_order_release);
}

std::string Group::where() const {
  return std::string(doing_) + " (call " + std::to_string(call_) + " of " + name(rank_) + ")";
}

std::string Group::name(int rank) const { return "rank " + std::to_string(number(rank)); }

std::string Group::who(int rank) const {
  return name(rank) + " (process " + std::to_string(processes_[static_cast<std::size_t>(rank)].pid()) + ")";
}

std::string Group::death_of(int rank, const std::string& noticed) const {
  return who(rank) + " has died; noticed " + noticed +
         ": look at that process's own output, then start the ranks again.";
}

void Group::interrupted(int peer, const std::function<bool()>& arrived) {
  if (left())
    throw UsageError("the communicator was closed by another thread while it waited in " + where() + ".");
  check();
  beat();
  try {
    let_caller_in();
  } catch (...) {
    leave();  // in the constructor too: nobody else would tell the peers
    throw;
  }
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const bool died = dead(r);  // read before `departed`, which a rank sets before it ends in good order
    const bool left = departed(r);
    // A rank that has left in good order matters only to ranks that still wait for it.
    if (left ? r != peer : !died) continue;
    if (arrived()) return;
    fail(FailureKind::peer_lost, left ? who(r) + " has closed its communicator, but " + where() +
                                            " still waits for it: make the same calls on every rank."
                                      : death_of(r, "in " + where()));
  }
}

// Two ranks that have slept may wake on one core. The kernel leaves them there for milliseconds if they then
// wait for each other in turn, and each call takes 70 us.
void Group::part_from(int peer) {
  if (patience_.crowded) return;
  const int core = host::current_core();
  if (core >= 0 && board(peer).core.load(std::memory_order_relaxed) == core) {
    board(rank_).core.store(-1, std::memory_order_relaxed);  // or the peer, which runs now, would move too
    host::leave_core(core);
  }
  board(rank_).core.store(host::current_core(), std::memory_order_relaxed);
}

bool Group::broken() {
  if (board(0).failure.stage.load(std::memory_order_acquire) != 0) return true;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !dead(r) || departed(r)) continue;
    record(FailureKind::peer_lost, death_of(r, "by " + name(rank_)));
    return true;
  }
  return false;
}

void Group::unreachable(int rank, int error) {
  check();
  if (error == ESRCH || dead(rank)) fail(FailureKind::peer_lost, death_of(rank, "in " + where()));
  fail(FailureKind::resource, "the buffer of " + name(rank) + " could not be reached in " + where() + " (" +
                                  std::strerror(error) +
                                  "): see that it is as large as the call says, or set UNISONO_FAR=0.");
}

std::vector<int> Group::absent() {
  std::vector<std::pair<int, std::uint32_t>> still;  // ranks, and their beats at the begin
  for (int r = 0; r < size_; ++r)
    if (r != rank_) still.emplace_back(r, board(r).beats.load(std::memory_order_relaxed));
  for (const auto began = Clock::now(); !still.empty() && Clock::now() - began < kMostCounted;) {
    std::this_thread::sleep_for(kLook);
    check();
    beat();
    std::erase_if(still, [this](const auto& one) {
      return board(one.first).beats.load(std::memory_order_relaxed) != one.second;
    });
  }
  std::vector<int> ranks;
  for (const auto& [r, beats] : still) ranks.push_back(r);
  return ranks;
}

// Blames the ranks that have not come. The rank that was waited for may itself wait for them.
void Group::late(int peer, Slot slot, std::uint32_t expected, std::uint32_t seen) {
  std::vector<int> missing = absent();
  if (missing.empty()) missing = {peer};
  std::string names = missing.size() > 1 ? "ranks " : "rank ";
  for (std::size_t i = 0; i < std::min(missing.size(), kMostNamed); ++i)
    names += (i == 0 ? "" : i + 1 == missing.size() ? " and " : ", ") + std::to_string(number(missing[i]));
  if (missing.size() > kMostNamed) names += " and " + std::to_string(missing.size() - kMostNamed) + " more";
  fail(FailureKind::timeout,
       where() + " has waited " + brief(timeout_s_) + " s for " + names + " (slot " +
           kSlotNames[static_cast<int>(slot)] + (missing == std::vector{peer} ? "" : " of " + name(peer)) +
           ", epoch expected " + std::to_string(expected) + ", seen " + std::to_string(seen) +
           "): see what " + (missing.size() > 1 ? "those ranks are" : "that rank is") +
           " doing, compare the calls with UNISONO_CHECK=1, or raise the deadline (timeout_s, "
           "UNISONO_TIMEOUT_S).");
}

void Group::differs(int peer) {
  fail(FailureKind::mismatch,
       where() + " met another call of " + name(peer) +
           ": make the same calls on every rank, in the same order, of the same counts, dtypes, "
           "operations and roots (UNISONO_CHECK=1 says which differ).");
}

void Group::fail(FailureKind kind, const std::string& text) {
  record(kind, text);
  raise_failure();
}

void Group::record(FailureKind kind, const std::string& text) {
  SharedFailure& failure = board(0).failure;
  std::uint32_t none = 0;
  if (failure.stage.compare_exchange_strong(none, 1)) {
    failure.kind = kind;
    const std::string_view fits = fitting(text, sizeof failure.text - 1);
    std::memcpy(failure.text, fits.data(), fits.size());
    failure.text[fits.size()] = '\0';
    failure.stage.store(2, std::memory_order_release);
  }
}

void Group::raise_failure() const {
  const SharedFailure& failure = board(0).failure;
  // A rank may be writing the failure now. If that rank dies, the kind stays unknown.
  const auto given_up = [this](int ms) {
    for (int r = 0; ms > 1000 && r < size_; ++r)
      if (r != rank_ && dead(r)) return true;
    return ms > 30000;
  };
  for (int ms = 0; failure.stage.load(std::memory_order_acquire) != 2 && !given_up(ms); ++ms) ::usleep(1000);
  if (failure.stage.load(std::memory_order_acquire) != 2)
    throw PeerLostError("a rank died while it reported a failure: start the ranks again.");
  raise({failure.kind, {failure.text, ::strnlen(failure.text, sizeof failure.text)}});
}

}  // namespace unisono
