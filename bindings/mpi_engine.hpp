// Messages between nodes by the MPI that mpi4py has loaded, called directly: mpi4py's own calls cost as much
// as a small message takes. Nonblocking and polled, since MPI's own wait has no deadline.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace unisono::python {

namespace nb = nanobind;

class MpiEngine {
 public:
  // To or from a rank of another node; not empty.
  struct Part {
    int rank;
    std::byte* data;
    std::size_t bytes;
  };
  class Exchange;

  // Of mpi4py's `communicator`, on which nothing else sends. names: what errors call each rank. crowded: more
  // ranks than cores. look: called every few milliseconds of a wait; what it throws ends that.
  MpiEngine(nb::handle communicator, int rank, std::vector<std::string> names, double timeout_s, bool crowded,
            std::function<void()> look);
  ~MpiEngine();
  MpiEngine(const MpiEngine&) = delete;

  // Starts all of them. `memory` keeps the parts alive until `wait` has returned, or, after a failure, for
  // ever: MPI may still touch them. The GIL is held; both give it away.
  Exchange& begin(std::span<const Part> sends, std::span<const Part> receives, nb::object memory);
  // Throws TimeoutError past the deadline, PeerLostError where MPI fails, and UnisonoError where a message
  // has another length than its receive.
  void wait(Exchange& exchange);

  // Forgets what is under way, whose memory stays; whether there was any.
  bool close();

 private:
  using Handle = std::uintptr_t;
  class Library;

  bool test(Exchange& exchange);
  [[noreturn]] void other_length(int rank, const std::string& sent, int expected) const;
  [[noreturn]] void late(Exchange& exchange);
  const std::string& name(int rank) const;
  void* request(Exchange& exchange, std::size_t index) const;

  std::unique_ptr<const Library> library_;
  Handle communicator_;
  const std::vector<std::string> names_;
  const std::string& me_;
  const std::chrono::duration<double> timeout_;
  const bool crowded_;
  const std::function<void()> look_;
  std::vector<std::byte> status_;
  std::vector<std::unique_ptr<Exchange>> open_, spare_;
};

}  // namespace unisono::python
