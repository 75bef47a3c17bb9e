// Communicators over the user's own MPI: header-only, compiled with the program against its mpi.h.
//
//   MPI_Init(&argc, &argv);
//   {
//     unisono::Communicator comm = unisono::mpi::communicator(MPI_COMM_WORLD, {.timeout_s = 30});
//     comm.all_reduce({.in = x, .out = y, .count = n});
//   }
//   MPI_Finalize();
//
// Ranks of one machine share memory; between machines MPI carries the messages. MPICH, Open MPI and Intel
// MPI.
#pragma once

#include <mpi.h>

#include <chrono>
#include <climits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "unisono/communicator.hpp"
#include "unisono/mpi_transport.hpp"

namespace unisono::mpi {

// A copy of an MPI communicator, which returns errors. Freed with the last owner unless MPI has ended.
class Handle {
 public:
  // Collective.
  explicit Handle(MPI_Comm comm) {
    if (MPI_Comm_dup(comm, &comm_) != MPI_SUCCESS)
      throw ResourceError("MPI_Comm_dup failed: give communicator() an intracommunicator of running ranks.");
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  }
  ~Handle() {
    if (running() && !keep_) MPI_Comm_free(&comm_);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  MPI_Comm get() const { return comm_; }
  void keep() { keep_ = true; }
  static bool running() {
    int begun = 0, ended = 0;
    MPI_Initialized(&begun);
    MPI_Finalized(&ended);
    return begun && !ended;
  }
  static std::string text(int code) {
    char words[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, words, &length);
    return {words, static_cast<std::size_t>(length)};
  }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  bool keep_ = false;
};

// Within its life MPI_Test returns errors under Intel MPI too, which raises them on MPI_COMM_WORLD and not on
// the request's communicator. Errors that other threads cause meanwhile are returned as well.
class ErrorsReturned {
 public:
  ErrorsReturned() {
    if (!needed()) return;
    const std::scoped_lock lock(mutex_);
    if (depth_++ > 0) return;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &programs_own_);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  ~ErrorsReturned() {
    if (!needed()) return;
    const std::scoped_lock lock(mutex_);
    if (--depth_ > 0) return;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, programs_own_);
    MPI_Errhandler_free(&programs_own_);
  }
  ErrorsReturned(const ErrorsReturned&) = delete;
  ErrorsReturned& operator=(const ErrorsReturned&) = delete;

 private:
  static bool needed() {
    static const bool intel = [] {
      char text[MPI_MAX_LIBRARY_VERSION_STRING];
      int length = 0;
      MPI_Get_library_version(text, &length);
      return std::string(text, static_cast<std::size_t>(length)).find("Intel(R) MPI") != std::string::npos;
    }();
    return intel;
  }
  inline static std::mutex mutex_;
  inline static int depth_ = 0;
  inline static MPI_Errhandler programs_own_ = MPI_ERRHANDLER_NULL;
};

// MPI_Test, which returns errors.
inline int test(MPI_Request* request, int* over, MPI_Status* status) {
  const ErrorsReturned returned;
  return MPI_Test(request, over, status);
}

// MPI's functions for MpiTransport.
struct Api {
  using Request = MPI_Request;
  using Status = MPI_Status;
  std::shared_ptr<Handle> comm;

  int isend(const void* data, int bytes, int rank, int tag, Request* request) const {
    return MPI_Isend(data, bytes, MPI_BYTE, rank, tag, comm->get(), request);
  }
  int irecv(void* data, int bytes, int rank, int tag, Request* request) const {
    return MPI_Irecv(data, bytes, MPI_BYTE, rank, tag, comm->get(), request);
  }
  int test(Request* request, int* over, Status* status) const { return mpi::test(request, over, status); }
  int get_count(const Status* status, int* bytes) const { return MPI_Get_count(status, MPI_BYTE, bytes); }
  int probe_any(int tag, int* there, int* source, int* bytes) const {
    MPI_Status status;
    const int code = MPI_Iprobe(MPI_ANY_SOURCE, tag, comm->get(), there, &status);
    if (code != MPI_SUCCESS || !*there) return code;
    *source = status.MPI_SOURCE;
    return MPI_Get_count(&status, MPI_BYTE, bytes);
  }
  int recv_from_any(void* data, int bytes, int tag) const {
    return MPI_Recv(data, bytes, MPI_BYTE, MPI_ANY_SOURCE, tag, comm->get(), MPI_STATUS_IGNORE);
  }
  bool running() const { return Handle::running(); }
  bool truncated(int code) const {
    int kind = code;
    MPI_Error_class(code, &kind);
    return kind == MPI_ERR_TRUNCATE;
  }
  std::string text(int code) const { return Handle::text(code); }
  void abandon() const { comm->keep(); }
};

// The ranks of an MPI communicator meet by it.
class MpiBootstrap final : public Bootstrap {
 public:
  MpiBootstrap(std::shared_ptr<Handle> comm, std::chrono::duration<double> timeout)
      : comm_(std::move(comm)), timeout_(timeout) {
    MPI_Comm_rank(comm_->get(), &rank_);
    MPI_Comm_size(comm_->get(), &size_);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::string> all_gather(const std::string& data) override {
    if (data.size() > kMostBytes)
      throw UsageError("an all_gather of the bootstrap takes at most 1 MiB of a rank.");
    const int mine = static_cast<int>(data.size());
    std::vector<int> lengths(static_cast<std::size_t>(size_)), starts = lengths;
    MPI_Request request;
    check(MPI_Iallgather(&mine, 1, MPI_INT, lengths.data(), 1, MPI_INT, comm_->get(), &request));
    wait(request);
    std::size_t total = 0;
    for (std::size_t r = 0; r < lengths.size(); ++r) {
      starts[r] = static_cast<int>(total);
      total += static_cast<std::size_t>(lengths[r]);
      if (lengths[r] < 0 || static_cast<std::size_t>(lengths[r]) > kMostBytes || total > INT_MAX)
        throw UsageError("rank " + std::to_string(r) + " sent a length at the bootstrap that cannot be.");
    }
    std::string whole(total, '\0');
    check(MPI_Iallgatherv(data.data(), mine, MPI_BYTE, whole.data(), lengths.data(), starts.data(), MPI_BYTE,
                          comm_->get(), &request));
    wait(request);
    std::vector<std::string> told;
    for (std::size_t r = 0; r < lengths.size(); ++r)
      told.push_back(whole.substr(static_cast<std::size_t>(starts[r]), static_cast<std::size_t>(lengths[r])));
    return told;
  }

 private:
  static constexpr std::size_t kMostBytes = 1 << 20;
  static void check(int code) {
    if (code != MPI_SUCCESS) throw ResourceError("MPI failed in the bootstrap: " + Handle::text(code));
  }
  // MPI's own wait has no deadline.
  void wait(MPI_Request& request) const {
    const auto began = std::chrono::steady_clock::now();
    for (int over = 0;;) {
      check(test(&request, &over, MPI_STATUS_IGNORE));
      if (over) return;
      if (std::chrono::steady_clock::now() - began > timeout_) {
        comm_->keep();
        throw TimeoutError("rank " + std::to_string(rank_) + " has waited " +
                           std::to_string(timeout_.count()) + " s to meet the other " +
                           std::to_string(size_ - 1) +
                           " ranks over MPI: make the communicator on every rank of the MPI communicator.");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  std::shared_ptr<Handle> comm_;
  std::chrono::duration<double> timeout_;
  int rank_ = 0, size_ = 0;
};

// Makes the communicator of the ranks of an MPI communicator. Collective. MPI is initialized, and is
// finalized after the communicator has been destroyed. One thread at a time calls MPI and the communicator,
// unless MPI was initialized for MPI_THREAD_MULTIPLE, as Communicator::begin needs on several nodes.
//
// Throws: as Communicator's constructor.
inline Communicator communicator(MPI_Comm comm, Communicator::Options options = {}) {
  if (!Handle::running())
    throw UsageError(
        "MPI is not running: call MPI_Init before unisono::mpi::communicator, and MPI_Finalize after the "
        "communicator has been destroyed.");
  const auto copy = std::make_shared<Handle>(comm);
  const auto bootstrap = std::make_shared<MpiBootstrap>(
      copy, std::chrono::duration<double>(options.timeout_s.value_or(default_timeout_s())));
  if (!options.transport)
    options.transport = [copy, rank = bootstrap->rank(), size = bootstrap->size()] {
      return std::make_shared<MpiTransport<Api>>(Api{copy}, rank, size);
    };
  return {bootstrap, options};
}

}  // namespace unisono::mpi
