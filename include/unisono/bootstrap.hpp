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

  // Collective. Gives everyone's bytes in rank order. What comes back is checked by the caller: it may be
  // hostile.
  virtual std::vector<std::string> all_gather(const std::string& data) = 0;
};

// Ranks that are threads of this process: element r is the bootstrap of rank r.
UNISONO_API std::vector<std::shared_ptr<Bootstrap>> thread_bootstraps(int size,
                                                                      std::chrono::duration<double> timeout);

}  // namespace unisono
