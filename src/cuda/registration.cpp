// Memory of the user's as symmetric memory.
#include <algorithm>

#include "core/allocation.hpp"
#include "cuda/gpu_engine.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {

std::shared_ptr<void> GpuEngine::register_memory(const MemoryRange& range) {
  auto owner = std::const_pointer_cast<void>(range.owner);
  auto* const begin = static_cast<byte*>(range.data);
  // without peer access nothing is symmetric
  const bool shared = range.bytes > 0 && peer_access_;
  AllocationAgreement agreement(group_, range.bytes, "", Agreed::registration);
  std::shared_ptr<DeviceMemory> own;
  DeviceMemory::Handle mine;
  agreement.attempt([&] {
    if (!shared) return;
    if (place(begin, 1).allocation != Place::kNone)
      throw UsageError("it is symmetric memory already: use memory of Communicator::empty as it is.");
    own = DeviceMemory::lend(begin, range.bytes, device_, neighbours_, owner);
    mine = own->handle();
  });
  const auto handles = agreement.meet(mine);
  if (!shared) return owner;
  std::vector<std::shared_ptr<DeviceMemory>> parts;
  agreement.attempt([&] {
    for (int r = 0; r < group_.size(); ++r)
      parts.push_back(r == group_.rank()
                          ? own
                          : DeviceMemory::open(handles[static_cast<std::size_t>(r)], range.bytes, device_,
                                               DeviceMemory::Kind::lent));
  });
  agreement.meet();
  return publish(std::move(parts));
}

void GpuEngine::end_registration(const std::function<void()>& meet) {
  const OnDevice on(device_);
  cudaDeviceSynchronize();  // what goes wrong there, the next call raises
  free_dropped(meet);
}

void GpuEngine::drop_registered() {
  const std::scoped_lock lock(symmetric_->mutex);
  for (auto one = symmetric_->all.begin(); one != symmetric_->all.end();)
    if (const auto next = std::next(one);
        one->second.parts[static_cast<std::size_t>(group_.rank())]->lent()) {
      symmetric_->dropped.insert(symmetric_->all.extract(one));
      one = next;
    } else one = next;
}

}  // namespace unisono::cuda
