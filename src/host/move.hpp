// The arithmetic of the host lane: copies and reductions over memory, for the best instruction set of the
// machine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "host/norms.hpp"
#include "host/rows.hpp"
#include "lane/lane.hpp"
#include "unisono/types.hpp"
#include "unisono/version.hpp"

namespace unisono::host {

inline constexpr std::size_t kPage = 4096;

// Returns whether string moves (rep movsb, of which libc's memcpy and the kernel's copies are made) may take
// 20 times as long: on AMD's cores they do where `to` lies 1 to 31 bytes further than `from` in a page
// (docs/notes/host-kernel.md). So do two arrays of whole pages that malloc has made one after the other.
inline bool string_moves_crawl(const void* to, std::uintptr_t from) {
  constexpr std::uintptr_t kNear = 32;
  const std::uintptr_t ahead = (reinterpret_cast<std::uintptr_t>(to) - from) % kPage;
  return ahead != 0 && ahead < kNear;
}

// Asks for a cache line that is written soon. Else the store waits until the core that has read the line has
// given it up.
inline void own(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

// Lets go of the cache lines of data that another core reads next: it finds them in the cache that both
// share, and need not fetch them from the writer's own. It would wait for the last ones of many. Requires:
// lets_go().
inline void let_go(const std::byte* data, std::size_t bytes) {
#if defined(__x86_64__)
  for (std::size_t at = 0; at < bytes; at += 64) asm volatile("cldemote %0" : : "m"(data[at]));
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}
// Returns whether this processor lets go of lines.
bool lets_go();

// From that many bytes on, data that one core writes for another begins a page of its own. A reader's core
// fetches what lies behind the lines that it reads, up to the end of their page: it would take the lines of
// the next piece from the writer, who has asked for them (docs/notes/host-messages.md).
inline constexpr std::size_t kPaged = 257;
// Returns where such a piece begins in a ring, behind one that ends at `end`: on a page of its own. A core
// that reads to the end of a page fetches the first lines of the next one too, which costs small pieces more
// than a gap does.
constexpr std::size_t behind(std::size_t end, std::size_t bytes) {
  constexpr std::size_t kApart = 1024, kMostApart = 8192;
  return std::max(round_up(end, kPage), bytes <= kMostApart ? end + kApart : 0);
}

// Combines `n_srcs` sources in order and writes every destination, as a lane's move with a reduction.
using Reduce = void (*)(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes);

// Copies one source to any number of destinations.
using Copy = void (*)(const Dst* dsts, int n_dsts, const byte* src, std::size_t bytes);

// Combines `n_srcs` sources in order, `count` elements each, after the wide result `prior` of earlier sources
// (null: none). ranks: 0 keeps the result wide, for sources still to come; otherwise it is finished for so
// many ranks and rounded. `out` may be `prior` or a source if their elements are as wide.
using Resume = void (*)(byte* out, const byte* prior, const byte* const* srcs, int n_srcs, std::size_t count,
                        int ranks);

// Does a lane's requantise. average: sums are divided by the number of sources.
using Requantise = void (*)(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, Plain plain,
                            bool average, std::size_t count);

// The bytes from which the kernels that go abreast do so.
inline constexpr std::size_t kAbreastFrom = std::size_t{32} << 10;

struct Kernels {
  const char* instruction_set;
  Copy copy;
  Copy copy_abreast;  // to one place, in parts side by side: pays on some machines if another core has lines
  Reduce reduce[kDTypes][kOps];
  Reduce reduce_abreast[kDTypes][kOps];  // so are the sums of two sources
  Resume resume[kDTypes][kOps];
  std::size_t wide_bytes[kDTypes];         // of the wide element of a dtype
  Requantise requantise[kDTypes][kWires];  // null where there is none
  const Rows& rows;
  const Norms& norms;
};

// Returns the kernels for this machine, or for UNISONO_ISA. Throws UsageError if the machine lacks that set.
const Kernels& kernels();

// Copies, unless it is where it goes. No bytes may have a null address.
inline void copy(byte* to, const byte* from, std::size_t bytes) {
  const Dst dst{to};
  if (to != from && bytes > 0) kernels().copy(&dst, 1, from, bytes);
}

// The kernels for each instruction set of this build (kernels.cpp, rows.cpp and norms.cpp, compiled once for
// each).
namespace baseline {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

}  // namespace unisono::host
