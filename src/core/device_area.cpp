#include "core/backend.hpp"
#include "unisono/device/area.hpp"

namespace unisono {

DeviceArea::DeviceArea(Communicator& communicator, std::size_t bytes, int signals, const std::string& name) {
  constexpr int kMostSignals = 1 << 24;
  constexpr std::size_t kMostBytes = std::size_t{1} << 48;
  if (signals < 0 || signals > kMostSignals || bytes > kMostBytes)
    throw UsageError("a device area cannot have " + std::to_string(bytes) + " bytes and " +
                     std::to_string(signals) + " signals: ask for at most 2^48 bytes and 0 to 2^24 signals.");
  AreaParts parts = communicator.impl_->make_area(bytes, signals, name);
  memory_ = std::move(parts.memory);
  handle_ = parts.handle;
}

}  // namespace unisono
