// Every dtype with every op, once: kernels call them through the table, so that their number does not
// multiply.
#include <cstdint>

#include "lane/cuda/reduction.cuh"

namespace unisono::cuda {

#define UNISONO_REDUCERS(T, op) {reduce<T, Op::op>, reduce_packets<T, Op::op>}
#define UNISONO_OPS(T)                                                                                      \
  {UNISONO_REDUCERS(T, sum), UNISONO_REDUCERS(T, prod), UNISONO_REDUCERS(T, min), UNISONO_REDUCERS(T, max), \
   UNISONO_REDUCERS(T, avg)}

__device__ const Reducers reductions[kDTypes][kOps] = {
    UNISONO_OPS(float),       UNISONO_OPS(double),       UNISONO_OPS(F16),          UNISONO_OPS(BF16),
    UNISONO_OPS(std::int8_t), UNISONO_OPS(std::uint8_t), UNISONO_OPS(std::int32_t), UNISONO_OPS(std::int64_t),
    UNISONO_OPS(E4M3),        UNISONO_OPS(E5M2)};

}  // namespace unisono::cuda
