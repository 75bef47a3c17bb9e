// Every dtype with every op, once: kernels call them through the table, so that their number does not
// multiply.
#include <cstdint>

#include "lane/cuda/reduction.cuh"

namespace unisono::cuda {

#define UNISONO_OPS(T) \
  {reduce<T, Op::sum>, reduce<T, Op::prod>, reduce<T, Op::min>, reduce<T, Op::max>, reduce<T, Op::avg>}

__device__ const Reduce reductions[kDTypes][kOps] = {
    UNISONO_OPS(float),       UNISONO_OPS(double),       UNISONO_OPS(F16),          UNISONO_OPS(BF16),
    UNISONO_OPS(std::int8_t), UNISONO_OPS(std::uint8_t), UNISONO_OPS(std::int32_t), UNISONO_OPS(std::int64_t),
    UNISONO_OPS(E4M3),        UNISONO_OPS(E5M2)};

}  // namespace unisono::cuda
