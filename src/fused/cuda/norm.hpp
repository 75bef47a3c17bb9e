// The kernel of the fused norms, and how it is started.
#pragma once

#include <cuda_runtime_api.h>

#include "base/bytes.hpp"
#include "unisono/fused.hpp"

namespace unisono::fused::gpu {

// Device memory: sums, residual, residual_out and out have the rows of a call.
struct Work {
  const byte *sums, *residual, *weight, *bias;
  byte *residual_out, *out, *scales;
  std::size_t hidden, row_bytes, scale_bytes;
  float eps, inverse;  // inverse: 1 / the scale of quant fp8
  NormQuant quant;
  bool whole;  // every row begins where 8 elements can be loaded at once
};

// Adds the residual to `rows` rows of sums, normalises and quantises. sums may be any output.
cudaError_t finish(const Work& work, std::size_t rows, DType dtype, bool layer, cudaStream_t stream);

}  // namespace unisono::fused::gpu
