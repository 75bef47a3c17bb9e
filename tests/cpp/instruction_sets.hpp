// The kernels of every instruction set of this machine.
#pragma once

#include <vector>

#include "host/move.hpp"

namespace unisono::test {

inline std::vector<const host::Kernels*> all_kernels() {
  std::vector<const host::Kernels*> found{&host::baseline::kernels};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) found.push_back(&host::avx2::kernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back(&host::avx512::kernels);
#endif
  return found;
}

}  // namespace unisono::test
