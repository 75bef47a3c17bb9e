// Every function of the device headers compiles alone, as C++17.
#include "unisono/device/verbs.cuh"

namespace device = unisono::device;

__global__ void all_verbs(const __grid_constant__ device::Handle handle, const void* source, bool* result) {
  device::put(handle, 0, 0, source, 1);
  device::signal(handle, 0, 0);
  *result = device::wait(handle, 0, 1) && device::take(handle, 0, 1, 0) && device::synchronise(handle, 1) &&
            device::thread_wait(handle, 0, 1);
}
