#include "unisono/combine.hpp"

#include <cstring>
#include <vector>

#include "core/request.hpp"
#include "cuda/nodes.hpp"
#include "host/move.hpp"
#include "unisono/error.hpp"

namespace unisono {

void combine_arrays(const Combination& sum) {
  if (sum.xs.empty()) throw UsageError("a sum of no arrays has no dtype and no elements: give one at least.");
  check_op(sum.dtype, sum.op, sum.memory);
  if (sum.count == 0) return;
  std::vector<const byte*> xs;
  for (const void* x : sum.xs) xs.push_back(static_cast<const byte*>(x));
  auto* const out = static_cast<byte*>(sum.out);
  const int ranks = static_cast<int>(xs.size());
  if (sum.memory == Memory::device)
    return cuda::combine(sum.device, sum.stream, {out, nullptr, xs, sum.count, sum.dtype, sum.op, ranks});
  const std::size_t bytes = sum.count * size_of(sum.dtype);
  if (ranks == 1) {  // reductions have two sources at least
    std::memmove(out, xs[0], bytes);
    return;
  }
  const Dst to{out};
  host::kernels().reduce[static_cast<int>(sum.dtype)][static_cast<int>(sum.op)](&to, 1, xs.data(), ranks,
                                                                                bytes);
}

}  // namespace unisono
