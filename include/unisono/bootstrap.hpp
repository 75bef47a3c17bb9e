// How ranks meet before they share memory: one call.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "unisono/version.hpp"

namespace unisono {

class UNISONO_API Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Returns everyone's bytes, in rank order. Collective. The caller checks what comes: it may be hostile.
  virtual std::vector<std::string> all_gather(const std::string& data) = 0;
};

// Returns the bootstraps of ranks that are threads of this process: element r is that of rank r. timeout: of
// a wait for the others.
UNISONO_API std::vector<std::shared_ptr<Bootstrap>> thread_bootstraps(int size,
                                                                      std::chrono::duration<double> timeout);

// Returns the bootstrap of the ranks that `unisono run` has started, of whom this process is one, or of this
// process alone. timeout: of a wait for the others. Every rank makes its bootstraps in the same order.
// Throws UsageError, which says what to do, under another launcher (for MPI there is unisono/mpi.hpp).
UNISONO_API std::shared_ptr<Bootstrap> environment_bootstrap(std::chrono::duration<double> timeout);

}  // namespace unisono
