#include "host/move.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <string>

#include "base/env.hpp"
#include "unisono/error.hpp"

namespace unisono::host {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const Kernels& pick() {
  const std::string& wanted = env().instruction_set;
#if defined(__x86_64__)
  if (has_avx512() && (wanted.empty() || wanted == "avx512")) return avx512::kernels;
  if (has_avx2() && (wanted.empty() || wanted == "avx2")) return avx2::kernels;
#endif
  if (wanted.empty() || wanted == "baseline") return baseline::kernels;
  throw UsageError("UNISONO_ISA=" + wanted +
                   " is not an instruction set of this machine: use baseline, or unset it.");
}

}  // namespace

bool lets_go() {
#if defined(__x86_64__)
  static const bool has_cldemote = [] {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ecx & 1u << 25) != 0;
  }();
  return has_cldemote;
#else
  return false;
#endif
}

const Kernels& kernels() {
  static const Kernels& best = pick();
  return best;
}

}  // namespace unisono::host
