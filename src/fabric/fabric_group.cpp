#include "fabric/fabric_group.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "base/text.hpp"
#include "core/greetings.hpp"
#include "fabric/library.hpp"
#include "unisono/error.hpp"

namespace unisono {

using fabric::Announcement;
using fabric::append;
using fabric::Immediate;
using fabric::Kind;
using fabric::take;

namespace {

constexpr std::string_view kMagic = "unisono-fabric-1";
constexpr double kProbeS = 0.2;      // between two probes whether a silent peer still takes writes
constexpr double kGraceS = 0.5;      // for writes of a rank that has gone to arrive
constexpr double kFarewellS = 1;     // for this rank's last writes to complete
constexpr double kStuckS = 1.5;      // in one call of libfabric, after a peer's death
constexpr double kStuckAliveS = 10;  // the same while all live: a shorter call may only have lost its core

constexpr std::string_view name_of(Kind kind) {
  constexpr std::string_view names[fabric::kKinds] = {"meet",  "piece",   "credit",  "bulk",
                                                      "probe", "failure", "departed"};
  return names[static_cast<int>(kind)];
}

// A rank's greeting at the bootstrap. Every field comes from outside and is checked.
struct Greeting {
  std::int32_t rank = 0, size = 0, pid = 0, channels = 0;
  std::uint32_t check = 0, policy = 0;
  std::uint64_t machine = 0, boot = 0, chunk_bytes = 0, most_bytes = 0, least_share = 0;
  Cores cores;
};

}  // namespace

FabricGroup::FabricGroup(Bootstrap& bootstrap, const Options& options)
    : rank_(bootstrap.rank()),
      size_(bootstrap.size()),
      usual_timeout_s_(options.lane.timeout.count()),
      timeout_s_(usual_timeout_s_),
      while_waiting_(options.while_waiting),
      gone_(static_cast<std::size_t>(std::max(size_, 0))) {
  check_rank(rank_, size_, fabric::kMostRanks);
  lane_ = std::make_unique<FabricEndpoint>(
      rank_, size_, options.lane,
      FabricEndpoint::Watch{
          [this](int peer, double elapsed_s, const std::function<bool()>& arrived) {
            try {
              let_caller_in();
            } catch (...) {
              left_ = true;  // in the middle of a call: the peers are told when it ends
              throw;
            }
            look(peer, elapsed_s, arrived);
          },
          [this](int peer) { late(peer); }, [this](int peer, const std::string& why) { broken(peer, why); },
          [this](int peer, const std::string& why) { unreachable(peer, why); },
          [this](const Immediate& word, const char* why) {
            fail(FailureKind::resource,
                 where() + " has got the immediate " +
                     std::string(static_cast<int>(word.kind) < fabric::kKinds ? name_of(word.kind) : "?") +
                     " " + std::to_string(word.number) + " of rank " + std::to_string(word.rank) +
                     ", which is refused: " + why +
                     ". The provider has delivered a write twice, or another program writes to this "
                     "endpoint; start the ranks again.");
          }});
  join(bootstrap, options);
}

void FabricGroup::join(Bootstrap& bootstrap, const Options& options) {
  const FabricEndpoint::Contact own = lane_->contact();
  Greeting mine;
  mine.rank = rank_;
  mine.size = size_;
  mine.pid = ::getpid();
  mine.channels = lane_->channels();
  mine.check = options.check;
  mine.policy = static_cast<std::uint32_t>(options.lane.policy);
  mine.machine = this_machine();
  mine.boot = this_boot();
  mine.cores = Cores::of_this_process();
  mine.chunk_bytes = lane_->chunk_bytes();
  mine.most_bytes = lane_->most_bytes();
  mine.least_share = lane_->least_share();
  std::string message(kMagic);
  append(message, mine);
  auto text = [&](const std::string& bytes) {
    append(message, static_cast<std::uint32_t>(bytes.size()));
    message += bytes;
  };
  text(options.lane.provider.name);
  for (const std::string& address : own.addresses) text(address);
  own.scratch.write(message);

  const auto greetings = greet(bootstrap, message);
  std::vector<FabricEndpoint::Contact> contacts;
  Cores cores;  // of this machine
  for (int r = 0; r < size_; ++r) {
    const std::string who = "rank " + std::to_string(r);
    std::string_view rest = greetings[static_cast<std::size_t>(r)];
    auto other = [&](bool differs, const std::string& what) {
      if (differs) throw UsageError(std::string(who).append(" ").append(what));
    };
    other(take(rest, std::min(rest.size(), kMagic.size()), who) != kMagic,
          "is no rank of this version's fabric lane: start every rank with the same version of Unisono and "
          "the same lane.");
    const auto theirs = take<Greeting>(rest, who);
    auto read = [&] { return std::string(take(rest, take<std::uint32_t>(rest, who), who)); };
    const std::string provider = read();
    other(theirs.rank != r, "says that it is rank " + std::to_string(theirs.rank) +
                                ": give each its own number below the size.");
    other(theirs.size != size_, "counts " + std::to_string(theirs.size) + " ranks, this one " +
                                    std::to_string(size_) + ": start them with the same size.");
    other(provider != options.lane.provider.name, "has provider " + provider + ", this one " +
                                                      options.lane.provider.name +
                                                      ": name the same on every rank.");
    other(theirs.channels != mine.channels || theirs.policy != mine.policy ||
              theirs.chunk_bytes != mine.chunk_bytes || theirs.most_bytes != mine.most_bytes ||
              theirs.least_share != mine.least_share,
          "has other channels, another policy, UNISONO_CHUNK_BYTES or UNISONO_FABRIC_SHARE than this one, or "
          "NICs where this one has a single NIC: set them the same on every rank.");
    other(
        theirs.check != mine.check,
        "and this one do not both check their calls: give check=, or UNISONO_CHECK, the same on every rank.");
    other(theirs.machine != mine.machine && options.lane.provider.one_machine,
          "runs on another machine or in another container, which provider " + provider +
              " does not reach: use tcp, or the NIC's.");
    FabricEndpoint::Contact contact;
    for (int c = 0; c < mine.channels; ++c) contact.addresses.push_back(read());
    // libfabric reads as many bytes of an address as this rank's addresses have
    for (std::size_t c = 0; c < contact.addresses.size(); ++c) {
      const std::size_t length = contact.addresses[c].size(), ours = own.addresses[c].size();
      const bool text = lane_->nic(static_cast<int>(c)).addr_format == FI_ADDR_STR;
      other(
          length == 0 || (!text && length != ours),
          "has an endpoint without an address, or with one of another kind: name the same provider on every "
          "rank.");
    }
    for (std::size_t c = 0; theirs.boot != mine.boot && c < contact.addresses.size(); ++c) {
      const fi_info& nic = lane_->nic(static_cast<int>(c));
      const std::string ip = fabric::ip_of(nic, own.addresses[c]);
      other(!ip.empty() && ip == fabric::ip_of(nic, contact.addresses[c]),
            "has the IP address of this one, " + ip +
                ", but is on another machine: set FI_TCP_IFACE (of libfabric 1.17 FI_NET_IFACE) to the "
                "interface between the machines.");
    }
    contact.scratch =
        Announcement::read(rest, static_cast<std::size_t>(mine.channels), own.scratch.bytes, who);
    contacts.push_back(std::move(contact));
    if (theirs.boot == mine.boot) {
      cores.add(theirs.cores);
      ++here_;
    }
    processes_.emplace_back();
    if (theirs.machine == mine.machine && theirs.pid > 0) processes_.back().emplace(theirs.pid);
  }
  if (std::count_if(processes_.begin(), processes_.end(), [](const auto& one) { return one && one->own(); }) >
      1) {
    // shm endpoints of one process do not tell each other where they have mapped each other
    if (options.lane.provider.name == "shm" && FI_VERSION_GE(fabric::library().version(), FI_VERSION(2, 5)))
      throw ResourceError("provider shm of libfabric " + fabric::library().version_text() +
                          " crashes between ranks that are threads of one process: use tcp, or a process for "
                          "each rank.");
    std::string all;
    for (const std::string& greeting : greetings) all += greeting;
    lane_->keep_until_last(all);
  }
  lane_->connect(std::move(contacts), here_ > cores.count());
  // no rank writes before every rank can take it
  for (const std::string& word : bootstrap.all_gather("connected"))
    if (word != "connected") throw UsageError("the bootstrap has lost its order: start the ranks again.");
  if (options.lane.provider.one_machine && size_ > 1)
    watchdog_ =
        std::make_unique<fabric::Watchdog>(lane_->calls(), [this](double seconds) { return stuck(seconds); });
}

std::string FabricGroup::stuck(double seconds) {
  for (int r = 0; r < size_ && !first_dead_; ++r)
    if (const auto& process = processes_[static_cast<std::size_t>(r)]; process && process->dead())
      first_dead_ = r;
  const bool without_end = first_dead_ && seconds > kStuckS;
  if (!without_end && seconds < std::max(timeout_s_.load(), kStuckAliveS)) return {};
  bury(true);
  if (without_end)
    return who(*first_dead_) + " has died within libfabric and left locks that " + where() +
           " waits for; this process ends: use another provider (tcp), or libfabric 1.20 or newer.";
  return where() + " has not come back from libfabric for " + std::to_string(std::lround(seconds)) +
         " s; this process ends: see whether the other ranks are stuck too, or use another provider (tcp).";
}

FabricGroup::~FabricGroup() {
  leave();
  if (!inherited()) return;
  // A forked child's copies are never destroyed. Closing the endpoints would shut the parent's connections
  // down and remove its files. The watchdog's thread is only in the parent.
  [[maybe_unused]] const auto* const lane = lane_.release();
  [[maybe_unused]] const auto* const watchdog = watchdog_.release();
}

std::string FabricGroup::where() const {
  return std::string(doing_) + " (call " + std::to_string(call_) + " of rank " + std::to_string(rank_) + ")";
}

std::string FabricGroup::who(int rank) const {
  const auto r = static_cast<std::size_t>(rank);
  std::string text = "rank " + std::to_string(rank);
  if (r >= processes_.size()) return text;
  if (const auto& process = processes_[r]) text += " (process " + std::to_string(process->pid()) + ")";
  return text;
}

void FabricGroup::bury(bool this_process_too) const noexcept {
  for (int r = 0; r < size_; ++r)
    if (const auto& process = processes_[static_cast<std::size_t>(r)];
        process && (process->dead() || (this_process_too && process->own())))
      lane_->bury(r);
}

void FabricGroup::enter(std::string_view what, std::uint64_t call) {
  // short: another call waits for its turn earlier, and nothing else that is inside calls the program's code
  while (inside_.exchange(true)) std::this_thread::sleep_for(std::chrono::microseconds(50));
  doing_ = what;
  call_ = call;
  check();
}

void FabricGroup::ended() noexcept {
  inside_ = false;
  if (left_) leave();  // a thread that left meanwhile could not tell the peers
}

void FabricGroup::check() {
  if (left_)
    throw UsageError("the communicator was closed by another thread while it waited in " + where() + ".");
  if (!failure_ && is_recorded_.load(std::memory_order_acquire) && recorded_)
    fail(recorded_->kind, recorded_->text);
  if (failure_) raise(*failure_);
}

void FabricGroup::look_for_failure() {
  if (left_ || inherited() || inside_.exchange(true)) return;
  struct End {
    FabricGroup& group;
    ~End() { group.ended(); }
  } const end{*this};
  lane_->progress();
  look();
}

void FabricGroup::record(FailureKind kind, const std::string& text) {
  if (inherited() || recording_.exchange(true)) return;
  recorded_ = Failure{kind, text};
  is_recorded_.store(true, std::memory_order_release);
}

// Handles a failed write: its peer is gone, or cannot be reached. `look` finds out why: a peer that has
// failed because of another rank, and has ended since, has told so.
void FabricGroup::broken(int peer, const std::string& why) {
  if (failure_ || left_) return;  // words to the peers are best effort
  if (peer >= 0 && lane_->told(peer, Kind::departed)) return;
  if (peer == fabric::Port::kQueue)
    fail(FailureKind::resource, "an endpoint has failed in " + where() + ": " + why + ".");
  if (!suspicion_) suspicion_ = {Clock::now(), peer, why};
}

void FabricGroup::unreachable(int peer, const std::string& why) {
  fail(FailureKind::peer_lost, who(peer) + " does not take writes any more (" + why + "); noticed in " +
                                   where() +
                                   ": see whether it has died, and that the network between reaches it.");
}

void FabricGroup::heed(int rank) {
  if (!lane_->told(rank, Kind::failure)) return;
  failure_ = failure_told(lane_->failure_of(rank));
  lane_->abandon();
  check();
}

void FabricGroup::heed() {
  for (int r = 0; r < size_; ++r)
    if (r != rank_) heed(r);
}

bool FabricGroup::gone_for_good(int rank, int awaited) {
  const bool departed = lane_->told(rank, Kind::departed);
  const auto& process = processes_[static_cast<std::size_t>(rank)];
  // a rank that has left in good order matters only to ranks that still wait for it
  if (departed ? rank != awaited : !(process && process->dead())) return false;
  auto& since = gone_[static_cast<std::size_t>(rank)];
  const auto now = Clock::now();
  if (!since) since = now;
  return std::chrono::duration<double>(now - *since).count() > kGraceS;
}

void FabricGroup::look(int peer, double elapsed_s, const std::function<bool()>& arrived) {
  check();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (arrived()) return;
    heed(r);
    if (!gone_for_good(r, peer)) continue;
    fail(FailureKind::peer_lost,
         lane_->told(r, Kind::departed)
             ? who(r) + " has closed its communicator, but " + where() +
                   " still waits for it: make the same calls on every rank."
             : who(r) + " has died; noticed in " + where() +
                   ": look at that process's own output, then start the ranks again.");
  }
  if (suspicion_) {
    const auto [since, suspect, why] = *suspicion_;
    for (int r = 0; r < size_ && suspect < 0; ++r)
      if (r != rank_ && lane_->quiet(r)) lane_->tell(r, Kind::probe);
    if (suspect >= 0 && lane_->told(suspect, Kind::departed)) suspicion_.reset();
    else if (std::chrono::duration<double>(Clock::now() - since).count() > 2 * kGraceS) {
      if (suspect >= 0) unreachable(suspect, why);
      fail(FailureKind::resource,
           "an endpoint has failed in " + where() + ": " + why +
               "; see whether a rank has died, and that the network between them works.");
    }
  }
  if (peer >= 0 && peer != rank_ && elapsed_s > kProbeS && lane_->quiet(peer) &&
      std::chrono::duration<double>(Clock::now() - probed_).count() > kProbeS) {
    probed_ = Clock::now();
    lane_->tell(peer, Kind::probe);  // fails if the peer is gone
  }
}

void FabricGroup::late(int peer) {
  const std::string waited = where() + " has waited " + brief(timeout_s_) + " s for ";
  fail(FailureKind::timeout,
       peer == rank_
           ? waited + "what its stream was given before: see what runs there, or raise UNISONO_TIMEOUT_S."
           : waited + "rank " + std::to_string(peer) +
                 ": see what that rank is doing, and that the network between reaches it, or raise "
                 "UNISONO_TIMEOUT_S.");
}

void FabricGroup::fail(FailureKind kind, const std::string& text) {
  if (!failure_) {
    failure_ = Failure{kind, text};
    lane_->abandon();
    try {
      lane_->tell_failure(told({kind, text}), [this](int r) {
        const auto& process = processes_[static_cast<std::size_t>(r)];
        return !process || !process->dead();
      });
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a peer that cannot be told finds out
    }
    settle(kFarewellS);
    bury(false);
  }
  raise(failure_.value_or(Failure{kind, text}));
}

// Waits until this rank's writes are complete, but not longer than `seconds`.
void FabricGroup::settle(double seconds) noexcept {
  const auto began = Clock::now();
  try {
    auto open = [this](int rank) {
      return !gone_[static_cast<std::size_t>(rank)] && !lane_->told(rank, Kind::departed) &&
             !lane_->quiet(rank);
    };
    for (int r = 0; r < size_; ++r)
      while (open(r) && std::chrono::duration<double>(Clock::now() - began).count() < seconds)
        if (!lane_->progress()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the writes are best effort
  }
}

void FabricGroup::leave() noexcept {
  left_ = true;
  if (inside_.exchange(true)) return;             // the thread inside tells the peers when it ends
  if (!inherited() && !farewell_ && !failure_) {  // of a failure the peers have been told
    farewell_ = true;
    try {
      for (int i = 1; i < size_; ++i)
        if (const int peer = peer_at(*lane_, i); !gone_[static_cast<std::size_t>(peer)])
          lane_->tell(peer, Kind::departed);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): a peer that cannot be told finds out
    }
    settle(kFarewellS);
  }
  inside_ = false;
}

}  // namespace unisono
