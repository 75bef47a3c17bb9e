// An MPI between threads of one process: MpiTransport's Api, with the errors of a real MPI.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace unisono::test {

// The state that the ranks of a fake MPI share. A send completes when its receive has copied the data, as a
// large one does in MPI.
struct FakeMpi {
  static constexpr int kSuccess = 0, kTruncated = 15, kFailed = 7;

  struct Operation {
    enum class Kind { send, receive } kind;
    int rank, peer, tag;
    std::byte* data;
    int bytes;
    int received = 0;  // bytes
    bool complete = false, truncated = false;
  };
  using Operations = std::vector<std::shared_ptr<Operation>>;

  std::mutex mutex;
  std::map<std::tuple<int, int, int>, Operations> sends, receives;  // unmatched, by (from, to, tag)
  std::map<int, std::shared_ptr<Operation>> requests;               // by handle; 0: MPI_REQUEST_NULL
  int last_request = 0;
  bool running = true;
  bool copies = true;  // false: memory stays untouched
  int calls = 0;       // of all functions except running()
  int abandoned = 0;   // calls of abandon()
  // Returns the error of a call on a rank. Empty: no call fails.
  std::function<int(const std::string& function, int rank, int peer)> fails;

  int begin(Operation::Kind kind, int rank, int peer, int tag, void* data, int bytes, int* request) {
    const bool sends_it = kind == Operation::Kind::send;
    const std::scoped_lock lock(mutex);
    if (const int code = failure(sends_it ? "isend" : "irecv", rank, peer)) return code;
    auto made =
        std::make_shared<Operation>(Operation{kind, rank, peer, tag, static_cast<std::byte*>(data), bytes});
    *request = ++last_request;
    requests[*request] = made;
    const auto way = sends_it ? std::tuple(rank, peer, tag) : std::tuple(peer, rank, tag);
    (sends_it ? sends : receives)[way].push_back(made);
    match(way);
    return kSuccess;
  }

  int failure(const std::string& function, int rank, int peer) {
    ++calls;
    return fails ? fails(function, rank, peer) : kSuccess;
  }

  // Requires: the mutex.
  void match(const std::tuple<int, int, int>& way) {
    auto &out = sends[way], &in = receives[way];
    while (!out.empty() && !in.empty()) {
      Operation &from = *out.front(), &to = *in.front();
      to.received = std::min(from.bytes, to.bytes);
      to.truncated = from.bytes > to.bytes;
      if (copies) std::memcpy(to.data, from.data, static_cast<std::size_t>(to.received));
      from.complete = to.complete = true;
      out.erase(out.begin());
      in.erase(in.begin());
    }
  }
};

// The Api of MpiTransport for one rank. Requests are handles, which a completed operation sets to 0.
struct FakeApi {
  using Request = int;
  struct Status {
    int bytes = 0;
  };
  std::shared_ptr<FakeMpi> mpi;
  int rank;

  int isend(const void* data, int bytes, int to, int tag, Request* request) const {
    return mpi->begin(FakeMpi::Operation::Kind::send, rank, to, tag, const_cast<void*>(data), bytes, request);
  }
  int irecv(void* data, int bytes, int from, int tag, Request* request) const {
    return mpi->begin(FakeMpi::Operation::Kind::receive, rank, from, tag, data, bytes, request);
  }
  int test(Request* request, int* flag, Status* status) const {
    const std::scoped_lock lock(mpi->mutex);
    *flag = 1;
    *status = {};
    const auto found = mpi->requests.find(*request);
    if (found == mpi->requests.end()) return FakeMpi::kSuccess;  // complete, and nothing to say, as in MPI
    const FakeMpi::Operation& operation = *found->second;
    if (const int code = mpi->failure("test", rank, operation.peer)) return code;
    *flag = operation.complete;
    if (!operation.complete) return FakeMpi::kSuccess;
    *status = {operation.received};
    const bool truncated = operation.truncated;
    mpi->requests.erase(found);
    *request = 0;
    return truncated ? FakeMpi::kTruncated : FakeMpi::kSuccess;
  }
  int get_count(const Status* status, int* bytes) const {
    *bytes = status->bytes;
    return FakeMpi::kSuccess;
  }
  int probe_any(int tag, int* flag, int* source, int* bytes) const {
    const std::scoped_lock lock(mpi->mutex);
    const auto from = sender(tag);
    *flag = from.has_value();
    if (from) {
      *source = *from;
      *bytes = mpi->sends[{*from, rank, tag}].front()->bytes;
    }
    return mpi->failure("probe_any", rank, -1);
  }
  int recv_from_any(void* data, int bytes, int tag) const {
    std::optional<int> from;
    {
      const std::scoped_lock lock(mpi->mutex);
      if (const int code = mpi->failure("recv_from_any", rank, -1)) return code;
      from = sender(tag);
    }
    Request request = 0;
    return irecv(data, bytes, from.value(), tag, &request);  // the message is there
  }
  bool running() const {
    const std::scoped_lock lock(mpi->mutex);
    return mpi->running;
  }
  bool truncated(int code) const { return code == FakeMpi::kTruncated; }
  std::string text(int code) const { return "fake MPI error " + std::to_string(code); }
  void abandon() const {
    const std::scoped_lock lock(mpi->mutex);
    ++mpi->abandoned;
  }

 private:
  // Requires: the mutex.
  std::optional<int> sender(int tag) const {
    for (const auto& [way, all] : mpi->sends)
      if (std::get<1>(way) == rank && std::get<2>(way) == tag && !all.empty()) return std::get<0>(way);
    return {};
  }
};

}  // namespace unisono::test
