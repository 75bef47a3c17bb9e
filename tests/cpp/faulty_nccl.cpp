// A stand-in for NCCL among threads of a process, over host memory: the end of a group waits for its
// messages. A call fails if the test has asked for that, or waits until it is aborted.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#define UNISONO_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kRemoteError = 6;

struct UniqueId {
  char internal[128];
};
struct Comm {
  int job, rank, size;
  bool aborted = false;
};
struct Operation {
  const void* from;
  void* to;
  std::size_t bytes;
  int peer;
  Comm* comm;
};

// Never destroyed: a thread that nobody joins waits for them when the process ends.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
std::string wanted;
std::deque<Comm>& comms = *new std::deque<Comm>;  // kept when aborted: a thread may still use one
int jobs = 0, aborts = 0;
std::map<int, int>& joined = *new std::map<int, int>;                          // ranks of each job
std::map<std::tuple<int, int, int>, std::vector<std::vector<char>>> messages;  // by job, sender, receiver
thread_local std::vector<Operation> group;

// Waits for done(), which is called under the lock. Returns an error once the communicator is aborted.
template <class Done>
int wait_for(std::unique_lock<std::mutex>& lock, const Comm* comm, const Done& done) {
  changed.wait(lock, [&] { return comm->aborted || done(); });
  return comm->aborted ? kRemoteError : kSuccess;
}

}  // namespace

UNISONO_EXPORT void unisono_test_fault(const char* fault) {
  const std::scoped_lock lock(mutex);
  wanted = fault;
  changed.notify_all();
}
UNISONO_EXPORT int unisono_test_aborts() {
  const std::scoped_lock lock(mutex);
  return aborts;
}

UNISONO_EXPORT int ncclGetUniqueId(UniqueId* id) {
  const std::scoped_lock lock(mutex);
  ++jobs;
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, &jobs, sizeof jobs);
  return kSuccess;
}

UNISONO_EXPORT int ncclCommInitRank(Comm** made, int size, UniqueId id, int rank) {
  std::unique_lock lock(mutex);
  if (wanted == "init") return kSystemError;
  int job = 0;
  std::memcpy(&job, id.internal, sizeof job);
  ++joined[job];
  changed.notify_all();
  changed.wait(lock, [&] { return joined[job] == size; });
  *made = &comms.emplace_back(Comm{job, rank, size});
  return kSuccess;
}

UNISONO_EXPORT int ncclCommAbort(Comm* comm) {
  const std::scoped_lock lock(mutex);
  comm->aborted = true;
  ++aborts;
  changed.notify_all();
  return kSuccess;
}

UNISONO_EXPORT int ncclCommGetAsyncError(Comm*, int* state) {
  const std::scoped_lock lock(mutex);
  *state = wanted == "async" ? kRemoteError : kSuccess;
  return kSuccess;
}

UNISONO_EXPORT int ncclGroupStart() {
  group.clear();
  return kSuccess;
}
UNISONO_EXPORT int ncclSend(const void* from, std::size_t bytes, int type, int peer, Comm* comm, void*) {
  {
    const std::scoped_lock lock(mutex);
    if (wanted == "send" || type != 1) return kSystemError;
  }
  group.push_back({from, nullptr, bytes, peer, comm});
  return kSuccess;
}
UNISONO_EXPORT int ncclRecv(void* to, std::size_t bytes, int type, int peer, Comm* comm, void*) {
  if (type != 1) return kSystemError;
  group.push_back({nullptr, to, bytes, peer, comm});
  return kSuccess;
}
UNISONO_EXPORT int ncclGroupEnd() {
  const std::vector<Operation> all = std::move(group);
  group.clear();
  std::unique_lock lock(mutex);
  for (const Operation& one : all) {
    if (!one.from) continue;
    const char* from = static_cast<const char*>(one.from);
    messages[{one.comm->job, one.comm->rank, one.peer}].emplace_back(from, from + one.bytes);
  }
  changed.notify_all();
  for (const Operation& one : all) {
    if (!one.to) continue;
    auto& come = messages[{one.comm->job, one.peer, one.comm->rank}];
    if (const int failed = wait_for(lock, one.comm, [&] { return !come.empty(); })) return failed;
    if (come.front().size() != one.bytes) return kSystemError;
    std::memcpy(one.to, come.front().data(), one.bytes);
    come.erase(come.begin());
  }
  return kSuccess;
}

UNISONO_EXPORT const char* ncclGetErrorString(int code) {
  return code == kRemoteError ? "remote process exited" : "unhandled system error";
}
UNISONO_EXPORT const char* ncclGetLastError(Comm*) { return "the test wants it\n"; }
