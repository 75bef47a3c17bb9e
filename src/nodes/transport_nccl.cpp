#include "nodes/transport_nccl.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <utility>

#include "base/deadline.hpp"
#include "base/text.hpp"
#include "unisono/error.hpp"

namespace unisono::nodes {
namespace {

constexpr auto kYielding = std::chrono::microseconds(200);  // then a wait sleeps between polls
constexpr auto kNap = std::chrono::microseconds(100);
constexpr auto kWatch = std::chrono::milliseconds(100);

// The stream's order is all that an exchange needs once it is enqueued.
class Enqueued final : public Transport::Pending {
 public:
  bool test() override { return true; }
  std::vector<int> open() override { return {}; }
};

// The state that a joining thread shares with the one that waits for it. NCCL's own wait for the others has
// no deadline, so that the thread may stay behind.
struct Joining {
  std::promise<void> entered;  // the thread needs the space no more
  std::mutex mutex;
  bool done = false, abandoned = false;
  nccl::Comm comm = nullptr;
  std::string problem;
};

void join_in_thread(const std::shared_ptr<Joining>& joining, const GpuSpace& space, int size,
                    const nccl::UniqueId& id, int rank) {
  std::shared_ptr<void> here;
  try {
    here = space.enter_thread();
  } catch (...) { return joining->entered.set_exception(std::current_exception()); }
  joining->entered.set_value();
  nccl::Comm comm = nullptr;
  std::string problem;
  try {
    nccl::check(nccl::library().comm_init_rank(&comm, size, id, rank), "ncclCommInitRank");
  } catch (const nccl::NcclError& error) { problem = error.what(); }
  const std::scoped_lock lock(joining->mutex);
  if (joining->abandoned && comm) nccl::library().comm_abort(comm);
  joining->comm = comm;
  joining->problem = problem;
  joining->done = true;
}

}  // namespace

NcclTransport::NcclTransport(const Setting& setting)
    : setting_(setting), pid_(::getpid()), rank_(setting.bootstrap.rank()), size_(setting.bootstrap.size()) {
  comm_ = join(meet());
  watcher_ = std::thread([this] { watch(); });
}

NcclTransport::~NcclTransport() {
  close();
  if (watcher_.joinable()) watcher_.detach();  // in a forked child, where there is no such thread
}

nccl::UniqueId NcclTransport::meet() const {
  nccl::UniqueId id{};
  std::string problem, mine = "ready";
  try {
    if (rank_ == 0) {
      nccl::check(nccl::library().get_unique_id(&id), "ncclGetUniqueId");
      mine.assign(id.internal, sizeof id.internal);
    } else {
      nccl::library();
    }
  } catch (const nccl::NcclError& error) {
    problem = error.what();
    mine.clear();
  }
  const std::vector<std::string> told = setting_.bootstrap.all_gather(mine);
  std::set<int> without;
  for (std::size_t r = 0; r < told.size(); ++r)
    if (told[r].empty()) without.insert(static_cast<int>(r));
  if (!without.empty())
    throw UsageError("GPUs of several nodes speak by NCCL, which " + names(without) +
                     " cannot use: " + (problem.empty() ? "see the error there" : problem) + ".");
  if (told.size() != static_cast<std::size_t>(size_) || told[0].size() != sizeof id.internal)
    throw ResourceError(
        "the bootstrap has not brought what rank 0 says of NCCL: start every rank with the same version of "
        "Unisono.");
  std::memcpy(id.internal, told[0].data(), sizeof id.internal);
  return id;
}

nccl::Comm NcclTransport::join(const nccl::UniqueId& id) const {
  const auto joining = std::make_shared<Joining>();
  std::thread([joining, &space = setting_.space, size = size_, id, rank = rank_] {
    join_in_thread(joining, space, size, id, rank);
  }).detach();
  joining->entered.get_future().get();
  auto abandon = [&] {
    const std::scoped_lock lock(joining->mutex);
    joining->abandoned = true;
    if (joining->done && joining->comm) nccl::library().comm_abort(joining->comm);
  };
  auto done = [&] {
    const std::scoped_lock lock(joining->mutex);
    return joining->done;
  };
  try {
    if (!within_deadline(done, setting_.look))
      throw TimeoutError(setting_.who(rank_) + " has waited " + brief(setting_.timeout_s) +
                         " s for the others to join NCCL: see what NCCL_DEBUG=WARN prints, and set "
                         "NCCL_SOCKET_IFNAME to the interface between the nodes.");
  } catch (...) {
    abandon();
    throw;
  }
  if (!joining->problem.empty())
    throw ResourceError(setting_.who(rank_) + " cannot join the others over NCCL (" + joining->problem +
                        "): see what NCCL_DEBUG=WARN prints.");
  return joining->comm;
}

std::unique_ptr<Transport::Pending> NcclTransport::exchange(std::span<const Outgoing> sends,
                                                            std::span<const Incoming> receives) {
  raise_if_late();
  std::set<int> peers;
  for (const Outgoing& one : sends) peers.insert(one.to);
  for (const Incoming& one : receives) peers.insert(one.from);
  spoken_to_.insert(peers.begin(), peers.end());
  UnderWay* mine = nullptr;
  if (!setting_.space.captured()) {
    auto begun = setting_.space.mark();
    const std::scoped_lock lock(mutex_);
    mine = &under_way_.emplace_back(UnderWay{++exchanges_, std::move(begun), nullptr});
  }
  try {
    enqueue(sends, receives);
  } catch (const nccl::NcclError& error) {
    if (mine) {
      const std::scoped_lock lock(mutex_);
      under_way_.pop_back();
    }
    raise_if_late();
    throw PeerLostError(setting_.who(rank_) + " cannot reach " + names(peers) + " over NCCL (" +
                        (comm_.load() ? error.what() : "it has been closed") +
                        "): look at the output there, and set NCCL_DEBUG=WARN to see more.");
  }
  if (mine) {
    auto ended = setting_.space.mark();
    const std::scoped_lock lock(mutex_);
    mine->ended = std::move(ended);
  }
  return std::make_unique<Enqueued>();
}

void NcclTransport::enqueue(std::span<const Outgoing> sends, std::span<const Incoming> receives) const {
  const nccl::Library& library = nccl::library();
  const nccl::Comm comm = comm_;
  if (!comm) throw nccl::NcclError("it has been closed");
  int state = nccl::kSuccess;
  nccl::check(library.comm_get_async_error(comm, &state), "ncclCommGetAsyncError");
  if (state != nccl::kInProgress) nccl::check(state, "an earlier call of NCCL");
  nccl::check(library.group_start(), "ncclGroupStart");
  void* const stream = setting_.space.stream();
  int sent = nccl::kSuccess, received = nccl::kSuccess;
  for (const Outgoing& one : sends)
    if (sent == nccl::kSuccess) sent = library.send(one.data, one.bytes, nccl::kBytes, one.to, comm, stream);
  for (const Incoming& one : receives)
    if (received == nccl::kSuccess)
      received = library.recv(one.data, one.bytes, nccl::kBytes, one.from, comm, stream);
  const int ended = library.group_end();  // always: an open group would hold back all later calls
  nccl::check(sent, "ncclSend");
  nccl::check(received, "ncclRecv");
  nccl::check(ended, "ncclGroupEnd");
}

void NcclTransport::synchronize(void* stream) {
  if (!within_deadline([&] { return setting_.space.idle(stream); }, setting_.look)) abort(true);
  raise_if_late();
  spoken_to_.clear();
}

void NcclTransport::close() noexcept {
  if (::getpid() != pid_) return;  // forked: NCCL is the parent's
  const std::scoped_lock one_closes(closing_);
  if (!watcher_.joinable()) return;
  auto over = [&] {
    try {
      setting_.look();
      const auto here = setting_.space.enter_thread();
      const std::scoped_lock lock(mutex_);
      forget_ended();
      return under_way_.empty() || !under_way_.front().ended || !watching_;
    } catch (const std::exception&) { return true; }  // the node has failed, or CUDA
  };
  within_deadline(over, [] {});
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
  }
  ending_.notify_all();
  abort(false);
  watcher_.join();
}

bool NcclTransport::within_deadline(const std::function<bool()>& done,
                                    const std::function<void()>& look) const {
  struct Late : std::exception {};
  auto rest = [](Clock::duration elapsed) {
    if (elapsed < kYielding) ::sched_yield();
    else std::this_thread::sleep_for(kNap);
  };
  try {
    wait_until(done, std::chrono::duration<double>(setting_.timeout_s), rest, look, [] { throw Late{}; });
  } catch (const Late&) { return false; }
  return true;
}

// NOLINTNEXTLINE(bugprone-exception-escape): where there is a communicator, the library is open already
void NcclTransport::abort(bool late) noexcept {
  const std::scoped_lock lock(aborting_);
  if (late) late_ = true;  // first: a thread within NCCL comes back with an error, and asks why
  if (const nccl::Comm comm = comm_.exchange(nullptr)) nccl::library().comm_abort(comm);
}

void NcclTransport::raise_if_late() const {
  if (late_)
    throw TimeoutError(setting_.who(rank_) + " has waited " + brief(setting_.timeout_s) +
                       " s on its GPU for " + names(spoken_to_) +
                       " over NCCL: see what those ranks and their links are doing, or raise "
                       "UNISONO_TIMEOUT_S.");
}

std::string NcclTransport::names(const std::set<int>& ranks) const {
  std::string all;
  for (const int rank : ranks) all += (all.empty() ? "" : ", ") + setting_.who(rank);
  return all;
}

void NcclTransport::forget_ended() {
  while (!under_way_.empty() && under_way_.front().ended && under_way_.front().ended->reached())
    under_way_.pop_front();
}

// Aborts NCCL past the deadline: a caller that waits for a stream by CUDA would wait for a lost peer for
// ever.
void NcclTransport::watch() noexcept {
  std::unique_lock lock(mutex_);
  try {
    const auto here = setting_.space.enter_thread();
    std::uint64_t oldest = 0;
    Clock::duration waited{};
    auto looked = Clock::now();
    while (!ending_.wait_for(lock, kWatch, [this] { return closed_; })) {
      const auto now = Clock::now();
      const auto passed = std::min<Clock::duration>(now - looked, kMostCounted);
      looked = now;
      forget_ended();
      if (under_way_.empty() || !under_way_.front().begun->reached()) continue;
      if (const std::uint64_t number = under_way_.front().number; number != oldest) {
        oldest = number;
        waited = {};
      } else if (waited += passed; waited > std::chrono::duration<double>(setting_.timeout_s)) {
        watching_ = false;
        lock.unlock();
        return abort(true);
      }
    }
  } catch (const std::exception&) {
    watching_ = false;  // CUDA has failed, as the next call finds too
  }
}

}  // namespace unisono::nodes
