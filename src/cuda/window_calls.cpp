// The calls of a window.
#include "cuda/gpu_engine.hpp"
#include "cuda/window.hpp"

namespace unisono::cuda {

void GpuEngine::begin_window(const device::Handle& area, void* stream) const {
  const OnDevice on(device_);
  device::Handle parameter = area;
  start(window_begin_kernel(), &parameter, Grid{.threads = kWindowThreads}, stream);
}

void GpuEngine::put_signal(const device::Handle& area, std::span<const byte> source, int peer,
                           std::size_t offset, std::uint32_t count, void* stream) const {
  const OnDevice on(device_);
  auto* const in_order = static_cast<cudaStream_t>(stream);
  copy(static_cast<byte*>(area.memory[peer]) + offset, source.data(), source.size(), in_order);
  write_signal(&area.signal[peer][signal_from(area.rank)].count, count, in_order);
}

void GpuEngine::wait_signals(WindowWait& wait, void* stream) const {
  const OnDevice on(device_);
  start(window_wait_kernel(), &wait, Grid{.threads = kWindowThreads}, stream);
}

}  // namespace unisono::cuda
