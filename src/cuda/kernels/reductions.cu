// The reductions of every dtype and op, once each. Kernels call them through the table, so that their number
// does not multiply.
#include "cuda/device/reduction.cuh"

namespace unisono::cuda {

#define UNISONO_REDUCE(T, op) reduce<T, op>
__device__ const Reduce reductions[kDTypes][kOps] = UNISONO_GPU_TABLE(UNISONO_REDUCE);

#define UNISONO_REDUCE_MANY(T, op) reduce_many<T, op>
__device__ const Reduce reductions_of_many[kDTypes][kOps] = UNISONO_GPU_TABLE(UNISONO_REDUCE_MANY);

}  // namespace unisono::cuda
