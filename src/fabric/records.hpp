// Records between nodes over the fabric, and the failures of their ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "unisono/communicator.hpp"
#include "unisono/transport.hpp"

namespace unisono::fabric {

// From any thread.
class Records : public Transport::Records {
 public:
  // As a Transport's. The first character of a failure is its kind, as a digit.
  virtual void tell(const std::string& failure) noexcept = 0;
  virtual std::optional<std::string> heard() = 0;
  virtual void close() noexcept = 0;
};

// Collective. Throws ResourceError if this build or this machine has no libfabric.
std::unique_ptr<Records> make_records(Bootstrap& bootstrap, double timeout_s);

}  // namespace unisono::fabric
