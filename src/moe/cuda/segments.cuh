// The shares of warps in rows.
#pragma once

#include "moe/cuda/device.cuh"

namespace unisono::moe::gpu {

// How rows are shared: each has as many segments, and a segment of a row is an item, which a warp takes.
struct Segments {
  static constexpr unsigned kMost = 32;  // segments of a row

  // Returns as many segments as so many warps can take at once. It divides, which takes the device a hundred
  // cycles.
  __host__ __device__ static Segments exact(unsigned rows, unsigned warps) {
    const unsigned each = warps / (rows > 1 ? rows : 1);
    return of(rows, each < 1 ? 1 : each < kMost ? each : kMost);
  }
  // Returns those by which the warp with most to do is done first: a row has so many steps, and an item takes
  // as long as kSteps more.
  static Segments even(unsigned rows, unsigned warps, unsigned steps) {
    constexpr unsigned kSteps = 8;
    unsigned best = 1, least = ~0u;
    for (unsigned each = 1; each <= kMost; ++each) {
      const unsigned most = (rows * each + warps - 1) / warps * ((steps + each - 1) / each + kSteps);
      if (most < least) least = most, best = each;
    }
    return of(rows, best);
  }
  // Takes as many as a power of two allows: no division, for which few tokens would wait.
  __device__ explicit Segments(unsigned rows, unsigned warps = warps_of_grid()) {
    const int shift = min(max(log2(warps) - log2(2 * max(rows, 1u) - 1), 0), log2(kMost));
    each = 1u << shift;
    by_each = (kOne >> shift) + 1;
    items = rows << shift;
  }
  __device__ unsigned row_of(unsigned item) const { return divide(item); }
  __device__ unsigned segment_of(unsigned item) const { return item - divide(item) * each; }
  // Returns the most steps of a segment.
  __device__ unsigned share(unsigned steps) const { return divide(steps + each - 1); }

  unsigned each, by_each, items;  // segments of a row; what replaces a division by that; segments of all rows

 private:
  static constexpr unsigned kOne = 1u << 31;
  Segments() = default;
  __host__ __device__ static Segments of(unsigned rows, unsigned each) {
    Segments segments;
    segments.each = each;
    segments.by_each = kOne / each + 1;
    segments.items = rows * each;
    return segments;
  }
  __device__ static int log2(unsigned number) { return 31 - __clz(static_cast<int>(number)); }
  __device__ unsigned divide(unsigned number) const { return __umulhi(2 * number, by_each); }
};

// The steps in which a warp has its segment of `count` items, `each` of them in a step.
struct Steps {
  __device__ Steps(unsigned count, unsigned each, unsigned segment, const Segments& of) {
    const unsigned all = (count + each - 1) / each, share = of.share(all);
    first = min(segment * share, all);
    end = min(first + share, all);
  }
  unsigned first, end;
};

}  // namespace unisono::moe::gpu
