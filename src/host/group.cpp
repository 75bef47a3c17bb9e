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
#include "host/mailbox.hpp"
#include "lane/channel.hpp"

namespace unisono {
namespace {

constexpr int kMostRanks = 1024;
constexpr std::size_t kMostNamed = 8;             // ranks in the text of a failure, which has 1000 bytes
constexpr std::size_t kMeasuredBytes = 16 << 10;  // of a piece when chunks are measured
constexpr int kManyRounds = 20;
constexpr std::uint32_t kVersion = 6;  // of the memory layout and of Hello

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
  Cores cores;
};

// Returns the bytes of a chunk: the chunks of all pairs of a rank take at most about 32 MiB.
std::size_t chunk_bytes_for(int ranks) {
  if (env().chunk_bytes) return std::max(round_up(env().chunk_bytes, kAlign), 2 * kAlign);
  const std::size_t share = (std::size_t{32} << 20) / HostThread::kChunks / static_cast<std::size_t>(ranks);
  return std::clamp(share / 4096 * 4096, std::size_t{4096}, std::size_t{65536});
}

// Returns the bytes of this core's second-level cache; many if the system does not tell.
std::size_t core_cache() {
  const long cache = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  return cache > 0 ? static_cast<std::size_t>(cache) : HostThread::Layout::kMostRings;
}

std::size_t default_stream_bytes() {
  const long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return cache > 0 ? static_cast<std::size_t>(cache) / 4 : std::size_t{4} << 20;
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
      stream_bytes_(env().stream_bytes ? env().stream_bytes : default_stream_bytes()) {
  check_rank(rank_, size_, kMostRanks);
  if (!numbers_.empty() && numbers_.size() != static_cast<std::size_t>(size_))
    throw UsageError("there are " + std::to_string(numbers_.size()) + " numbers for " +
                     std::to_string(size_) + " ranks: give each rank its number in the whole job.");
  HostThread::Layout layout(size_, chunk_bytes_for(size_), sizeof(Board));
  mail_at_ = layout.bytes;
  const std::size_t bytes = layout.bytes + Mailbox::bytes(size_);
  auto own = Segment::create(bytes);
  Hello mine;
  mine.rank = rank_;
  mine.size = size_;
  mine.machine = this_machine();
  mine.check = check;
  mine.chunk_bytes = layout.chunk_bytes;
  mine.core_cache = core_cache();
  mine.segment = own->handle();
  mine.nonce_at = reinterpret_cast<std::uint64_t>(&own->nonce());
  mine.cores = Cores::of_this_process();
  const auto greetings = greet(bootstrap, std::string(reinterpret_cast<const char*>(&mine), sizeof mine));

  bool far = env().far;
  std::vector<int> pids;
  Cores cores;
  std::uint64_t least_cache = mine.core_cache;  // cores of one machine may differ
  std::set<std::uint64_t> segments;
  for (int r = 0; r < size_; ++r) {
    const Hello hello = read(greetings[static_cast<std::size_t>(r)], r, mine, name(r));
    if (!segments.insert(hello.segment.nonce).second)
      throw UsageError("two ranks announce the same memory: give each rank its own number.");
    segments_.push_back(r == rank_ ? own : Segment::open(hello.segment, bytes));
    const bool thread = hello.segment.pid == ::getpid();
    std::uint64_t nonce = 0;
    far = far && (thread || (host::Far::read(hello.segment.pid, hello.nonce_at, &nonce, sizeof nonce) &&
                             nonce == hello.segment.nonce));
    one_process_ = one_process_ && thread;
    processes_.emplace_back(hello.segment.pid);
    pids.push_back(hello.segment.pid);
    cores.add(hello.cores);
    least_cache = std::min(least_cache, hello.core_cache);
  }
  layout.fit_rings(least_cache);

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
          [this](int peer) { differs(peer); }, [this](int peer) { part_from(peer); }});
  // Also keeps every rank until all have mapped all memory: a rank's own descriptors are needed until then.
  far_ = true;
  for (const std::string& reach : bootstrap.all_gather(far ? "far" : "near")) far_ = far_ && reach == "far";
  if (size_ > 1) choose_chunks(ranks_a_core_ > 1 ? kFewRounds : kManyRounds);
}

// All ranks choose alike, since plans depend on the choice: the sums over the ranks decide.
void Group::choose_chunks(int rounds) {
  moved_ = 0;
  ChunkTimes times = time_chunks(rounds);
  if (const auto& asked = env().stream_chunks) times = *asked ? ChunkTimes{1e9, 0} : ChunkTimes{0, 1e9};
  double through = 0, around = 0;
  for (const ChunkTimes& one : exchange(times)) through += one.through, around += one.around;
  cached_ = through <= host::kAroundPays * around;
  lane_->stream_chunks(!cached_);
}

// Times a piece to a peer and one from a peer, by chunks written through the cache and around it. Stores into
// the cache first fetch the lines from the other core's cache. Only a measurement tells how that compares
// with the trip through memory. Only a rank's own copies are timed: its waits may begin on one core, and
// waking a sleeper takes longer than a piece. Before the way through the cache is timed, pieces go once
// around the ring by it, unless they have gone that way so far: the ring must be in the caches that it will
// be in.
Group::ChunkTimes Group::time_chunks(int rounds) {
  ChunkChannel channel(*lane_);
  const int next = peer_at(*lane_, 1), last = peer_at(*lane_, size_ - 1);
  const std::vector<byte> sent(std::min(lane_->chunk_bytes(), kMeasuredBytes));
  std::vector<byte> received(sent.size());
  auto copy = [&](Dst to, const byte* from) {
    const auto began = Clock::now();
    lane_->move(&to, 1, &from, 1, sent.size());
    return std::chrono::duration<double, std::micro>(Clock::now() - began).count();
  };
  auto median = [&](bool around, int before) {
    lane_->stream_chunks(around);
    std::vector<double> took;
    for (int round = -before; round < rounds; ++round) {
      const double put = copy(channel.reserve(next, sent.size()), sent.data());
      channel.commit(next, sent.size());
      const double take = copy({received.data()}, channel.arrived(last, received.size()));
      channel.release(last);
      if (round >= 0) took.push_back(put + take);
    }
    std::nth_element(took.begin(), took.begin() + rounds / 2, took.end());
    return took[static_cast<std::size_t>(rounds / 2)];
  };
  const auto lap = static_cast<int>(lane_->ring_bytes() / sent.size());
  const double through = median(false, cached_ ? 0 : patience_.crowded ? kFewRounds : lap);
  return {through, median(true, 0)};
}

Group::~Group() { leave(); }

bool Group::copy(byte* to, const byte* from, std::size_t bytes) const {
  if (host::is_far(from))
    return host::Far::read(processes_[static_cast<std::size_t>(host::rank_of(from))].pid(),
                           host::address_of(from), to, bytes);
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
