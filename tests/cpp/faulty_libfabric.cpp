// A libfabric with faults. Passes all calls on to the real one. If the test asks for it, refuses a
// registration, reports an overrun of a completion queue, delivers a remote completion twice or too late,
// says that a write has failed, or keeps writes waiting in a queue on this side.
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace {

std::atomic<const char*> wanted{""};
std::mutex mutex;
// The real functions of each object, and those with the faults.
template <class Ops>
std::map<fid*, std::pair<const Ops*, Ops>> known;

template <class Function>
Function real(const char* name) {
  static void* const from = ::dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function>(::dlsym(from, name));
}

bool asked_for(const char* fault) { return std::strcmp(wanted, fault) == 0; }
// Returns whether that fault is due. Each is made once.
bool due(const char* fault) {
  const char* now = wanted;
  return std::strcmp(now, fault) == 0 && wanted.compare_exchange_strong(now, "");
}

// Replaces the functions of an object by a copy that `change` alters.
template <class Ops, class Change>
void patch(fid* object, Ops*& ops, const Change& change) {
  const std::scoped_lock lock(mutex);
  auto& [before, after] = known<Ops>[object];
  before = ops;
  after = *ops;
  change(after);
  ops = &after;
}
template <class Ops>
const Ops& real_of(fid* object) {
  const std::scoped_lock lock(mutex);
  return *known<Ops>.at(object).first;
}

int regattr(fid* domain, const fi_mr_attr* attributes, std::uint64_t flags, fid_mr** mr) {
  if (due("registration")) return -FI_ENOMEM;
  return real_of<fi_ops_mr>(domain).regattr(domain, attributes, flags, mr);
}

// The last remote completion, for a repetition.
thread_local fi_cq_data_entry last;
thread_local bool any = false;

// Writes of this thread's rank that wait for looks at the completion queue, as behind a full socket.
thread_local std::deque<std::function<ssize_t()>> waiting;
thread_local int looks = 0;
constexpr int kLooks = 50;

ssize_t queued(std::function<ssize_t()> write) {
  if (waiting.empty()) looks = 0;
  waiting.push_back(std::move(write));
  return 0;
}
void look() {
  if (++looks < kLooks) return;
  while (!waiting.empty() && waiting.front()() != -FI_EAGAIN) waiting.pop_front();
}

// Endpoints that have written kLarge bytes or more at once.
std::set<fid_ep*> busy;
constexpr std::size_t kLarge = 64 << 10;

ssize_t writedata(fid_ep* endpoint, const void* from, std::size_t bytes, void* descriptor, std::uint64_t data,
                  fi_addr_t peer, std::uint64_t to, std::uint64_t key, void* context) {
  if (bytes >= kLarge) {
    const std::scoped_lock lock(mutex);
    busy.insert(endpoint);
  }
  auto write = [=] {
    return real_of<fi_ops_rma>(&endpoint->fid)
        .writedata(endpoint, from, bytes, descriptor, data, peer, to, key, context);
  };
  return waiting.empty() && !asked_for("full") ? write() : queued(write);
}
ssize_t injectdata(fid_ep* endpoint, const void* from, std::size_t bytes, std::uint64_t data, fi_addr_t peer,
                   std::uint64_t to, std::uint64_t key) {
  std::array<char, 64> copy{};
  std::memcpy(copy.data(), from, bytes);
  auto write = [=] {
    return real_of<fi_ops_rma>(&endpoint->fid).injectdata(endpoint, copy.data(), bytes, data, peer, to, key);
  };
  return waiting.empty() && !asked_for("full") ? write() : queued(write);
}

// The context of a write that is said to have failed, until that is read.
thread_local void* failed = nullptr;

// Takes a write out of completions, and says that it has failed. Returns how many are left.
ssize_t without_write(fi_cq_data_entry* entries, ssize_t got) {
  auto* const end = entries + got;
  auto* const write = std::find_if(
      entries, end, [](const auto& one) { return (one.flags & FI_WRITE) != 0 && one.op_context; });
  if (write == end || !due("write")) return got;
  failed = write->op_context;
  std::move(write + 1, end, write);
  return got > 1 ? got - 1 : -FI_EAVAIL;
}

ssize_t readerr(fid_cq* queue, fi_cq_err_entry* entry, std::uint64_t flags) {
  if (!failed) return real_of<fi_ops_cq>(&queue->fid).readerr(queue, entry, flags);
  *entry = {};
  entry->op_context = std::exchange(failed, nullptr);
  entry->err = FI_ENOTCONN;
  return 1;
}

ssize_t read(fid_cq* queue, void* buffer, std::size_t count) {
  look();
  auto* const entries = static_cast<fi_cq_data_entry*>(buffer);
  if (failed) return -FI_EAVAIL;
  if (due("overrun")) return -FI_EOVERRUN;
  if (any && due("duplicate")) {
    entries[0] = last;
    return 1;
  }
  if (any && due("stale")) {
    entries[0] = last;
    entries[0].data = (last.data & ~std::uint64_t{0x7ffff}) | 0x60000;
    return 1;
  }
  const ssize_t got = real_of<fi_ops_cq>(&queue->fid).read(queue, buffer, count);
  for (ssize_t i = 0; i < got; ++i)
    if ((entries[i].flags & FI_REMOTE_CQ_DATA) != 0 && (entries[i].flags & FI_WRITE) == 0)
      last = entries[i], any = true;
  return got > 0 && asked_for("write") ? without_write(entries, got) : got;
}

int endpoint(fid_domain* domain, fi_info* info, fid_ep** made, void* context) {
  const int code = real_of<fi_ops_domain>(&domain->fid).endpoint(domain, info, made, context);
  if (code == 0 && info->ep_attr->type == FI_EP_RDM)  // a provider makes inner endpoints of other types
    patch(&(*made)->fid, (*made)->rma, [](fi_ops_rma& ops) {
      ops.writedata = writedata;
      ops.injectdata = injectdata;
    });
  return code;
}

int cq_open(fid_domain* domain, fi_cq_attr* attributes, fid_cq** queue, void* context) {
  const int code = real_of<fi_ops_domain>(&domain->fid).cq_open(domain, attributes, queue, context);
  if (code == 0)
    patch(&(*queue)->fid, (*queue)->ops, [](fi_ops_cq& ops) {
      ops.read = read;
      ops.readerr = readerr;
    });
  return code;
}

int domain(fid_fabric* fabric, fi_info* info, fid_domain** made, void* context) {
  const int code = real_of<fi_ops_fabric>(&fabric->fid).domain(fabric, info, made, context);
  if (code != 0) return code;
  patch(&(*made)->fid, (*made)->ops, [](fi_ops_domain& ops) {
    ops.cq_open = cq_open;
    ops.endpoint = endpoint;
  });
  patch(&(*made)->fid, (*made)->mr, [](fi_ops_mr& ops) { ops.regattr = regattr; });
  return 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
void unisono_test_fault(const char* fault) { wanted = fault; }
// Returns how many endpoints have made large writes since the last call.
std::size_t unisono_test_busy() {
  const std::scoped_lock lock(mutex);
  return std::exchange(busy, {}).size();
}
int fi_getinfo(std::uint32_t version, const char* node, const char* service, std::uint64_t flags,
               const fi_info* hints, fi_info** info) {
  return real<decltype(&fi_getinfo)>("fi_getinfo")(version, node, service, flags, hints, info);
}
void fi_freeinfo(fi_info* info) { real<decltype(&fi_freeinfo)>("fi_freeinfo")(info); }
fi_info* fi_dupinfo(const fi_info* info) { return real<decltype(&fi_dupinfo)>("fi_dupinfo")(info); }
const char* fi_strerror(int code) { return real<decltype(&fi_strerror)>("fi_strerror")(code); }
std::uint32_t fi_version(void) { return real<decltype(&fi_version)>("fi_version")(); }
int fi_fabric(fi_fabric_attr* attributes, fid_fabric** fabric, void* context) {
  const int code = real<decltype(&fi_fabric)>("fi_fabric")(attributes, fabric, context);
  if (code == 0) patch(&(*fabric)->fid, (*fabric)->ops, [](fi_ops_fabric& ops) { ops.domain = domain; });
  return code;
}
}
#pragma GCC visibility pop
