// The memory that all ranks' GPUs reach: how it is shared, symmetric buffers, and device areas.
#include <algorithm>

#include "base/env.hpp"
#include "core/allocation.hpp"
#include "cuda/gpu_engine.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {

DeviceMemory::Kind GpuEngine::kind_for_peers() {
  return env().cuda_ipc ? DeviceMemory::Kind::ipc : DeviceMemory::Kind::vmm;
}

std::vector<std::shared_ptr<DeviceMemory>> GpuEngine::share(std::size_t bytes, DeviceMemory::Kind kind) {
  AllocationAgreement agreement(group_, bytes,
                                kind == DeviceMemory::Kind::host ? "pinned host memory" : "GPU memory");
  const std::size_t size = std::max<std::size_t>(bytes, 1);
  std::shared_ptr<DeviceMemory> own;
  agreement.attempt([&] { own = DeviceMemory::create(size, device_, neighbours_, kind); });
  const auto handles = agreement.meet(own ? own->handle() : DeviceMemory::Handle{});
  std::vector<std::shared_ptr<DeviceMemory>> parts;
  agreement.attempt([&] {
    for (int r = 0; r < group_.size(); ++r) {
      if (r == group_.rank()) parts.push_back(own);
      else if (kind == DeviceMemory::Kind::local) parts.emplace_back();
      else parts.push_back(DeviceMemory::open(handles[static_cast<std::size_t>(r)], size, device_, kind));
    }
  });
  agreement.meet();
  return parts;
}

GpuEngine::Found GpuEngine::find(const byte* at, std::size_t bytes) const {
  for (const auto& [number, allocation] : symmetric_->all) {
    const DeviceMemory& mine = *allocation.parts[static_cast<std::size_t>(group_.rank())];
    // not its end, where another one may begin
    if (at >= mine.data() && at < mine.data() + mine.bytes() &&
        bytes <= mine.bytes() - static_cast<std::size_t>(at - mine.data()))
      return {&allocation, {.allocation = number, .offset = static_cast<std::uint64_t>(at - mine.data())}};
  }
  return {};
}

Place GpuEngine::place(const byte* at, std::size_t bytes) const {
  const std::scoped_lock lock(symmetric_->mutex);
  return find(at, bytes).place;
}

byte* GpuEngine::seen_by(int peer, const byte* at, std::size_t bytes) const {
  const std::scoped_lock lock(symmetric_->mutex);
  const Found mine = find(at, bytes);
  byte* const there = mine.allocation ? mine.allocation->seen[static_cast<std::size_t>(peer)] : nullptr;
  return there ? there + mine.place.offset : nullptr;
}

std::shared_ptr<void> GpuEngine::allocate(std::size_t bytes) {
  free_dropped([this] { group_.exchange(char{}); });
  return publish(share(bytes, peer_access_ ? kind_for_peers() : DeviceMemory::Kind::local));
}

std::shared_ptr<void> GpuEngine::publish(std::vector<std::shared_ptr<DeviceMemory>> parts) {
  struct Mapped {
    byte* at[kMaxRanks];
  };
  const auto me = static_cast<std::size_t>(group_.rank());
  Mapped mine{};
  for (std::size_t r = 0; r < parts.size(); ++r) mine.at[r] = parts[r] ? parts[r]->data() : nullptr;
  std::vector<byte*> seen;
  for (const Mapped& one : group_.exchange(mine)) seen.push_back(one.at[me]);
  void* data = parts[me]->data();
  const std::scoped_lock lock(symmetric_->mutex);
  const std::uint32_t number = ++symmetric_->made;
  symmetric_->all[number] = {std::move(parts), std::move(seen)};
  // a buffer may outlive the engine
  return {data, [symmetric = symmetric_, number](void*) {
            const std::scoped_lock lock(symmetric->mutex);
            symmetric->dropped.insert(symmetric->all.extract(number));
          }};
}

void GpuEngine::free_dropped(const std::function<void()>& meet) {
  decltype(symmetric_->dropped) dropped;  // freed without the lock
  {
    const std::scoped_lock lock(symmetric_->mutex);
    dropped.swap(symmetric_->dropped);
  }
  for (auto& [number, allocation] : dropped)
    for (std::size_t r = 0; r < allocation.parts.size(); ++r)
      if (static_cast<int>(r) != group_.rank()) allocation.parts[r].reset();
  meet();
}

// Signals first, then memory: one allocation, so that there is one way to make, reach and free it.
AreaParts GpuEngine::make_area(std::size_t bytes, int signals, const std::string& name,
                               const Explain& explain) {
  struct Asked {
    std::uint64_t bytes, signals;
    std::string text() const {
      return std::to_string(bytes) + " bytes and " + std::to_string(signals) + " signals";
    }
  };
  const auto asked = group_.exchange(Asked{bytes, static_cast<std::uint64_t>(signals)});
  auto differs = [&](const Asked& one) {
    return one.bytes != asked[0].bytes || one.signals != asked[0].signals;
  };
  if (const auto one = std::find_if(asked.begin(), asked.end(), differs); one != asked.end())
    group_.fail(FailureKind::mismatch,
                "rank " + std::to_string(group_.number(0)) + " asked for a device area of " +
                    asked[0].text() + ", but rank " +
                    std::to_string(group_.number(static_cast<int>(one - asked.begin()))) + " for one of " +
                    one->text() + ": ask for the same on every rank.");
  if (!nvlink_)
    throw UsageError((name.empty() ? "a device area" : name) +
                     " needs peer access over NVLink, which this process does not find between all of this "
                     "communicator's GPUs or an option has switched off: send messages instead.");
  const std::size_t head = round_up(static_cast<std::size_t>(signals) * sizeof(device::Signal), 256);
  AreaParts made{allocate(head + bytes), {}};
  device::Handle& handle = made.handle;
  handle.rank = group_.rank();
  handle.ranks = group_.size();
  handle.signals = signals;
  handle.bytes = bytes;
  handle.timeout_ns = timeout_ns();
  handle.failure = base_.failure;
  const std::scoped_lock lock(symmetric_->mutex);
  symmetric_->areas.push_back({name, explain});
  handle.area = static_cast<std::int32_t>(symmetric_->areas.size());
  const Allocation& allocation = *find(static_cast<const byte*>(made.memory.get()), 0).allocation;
  for (int r = 0; r < group_.size(); ++r) {
    byte* const begin = allocation.parts[static_cast<std::size_t>(r)]->data();
    handle.signal[r] = reinterpret_cast<device::Signal*>(begin);
    handle.memory[r] = begin + head;
    handle.status[r] = reinterpret_cast<Header*>(bases_[static_cast<std::size_t>(r)]);
  }
  return made;
}

}  // namespace unisono::cuda
