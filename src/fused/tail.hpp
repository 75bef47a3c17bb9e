// Finishes summed rows in host memory, by the kernels of the machine.
#pragma once

#include <vector>

#include "fused/task.hpp"
#include "host/move.hpp"

namespace unisono::fused {

class Tail {
 public:
  explicit Tail(const Task& task)
      : task_(task),
        parameters_{static_cast<const byte*>(task.call.weight), static_cast<const byte*>(task.call.bias),
                    task.call.eps, task.streams},
        join_(host::kernels().norms.join[static_cast<int>(task.call.dtype)]),
        normalise_(
            host::kernels().norms.normalise[static_cast<int>(task.call.dtype)][static_cast<int>(task.kind)]),
        quantise_(host::kernels()
                      .norms.quantise[static_cast<int>(task.call.dtype)][static_cast<int>(task.call.quant)]),
        element_(size_of(task.call.dtype)),
        inverse_(1 / task.call.scale),
        row_(quantise_ ? task.row_bytes : 0) {}

  // Sums `bytes` of rows from `n` sources, and adds the residual.
  void join(byte* to, const byte* const* srcs, int n, const byte* residual, std::size_t bytes) {
    join_(to, srcs, n, residual, bytes / element_);
  }
  // Writes row `row` of out, and its scales, from a row of residual_out. next: a row that is read after it;
  // null: none.
  void finish(std::size_t row, const byte* from, const byte* next = nullptr) {
    finish(task_.out(row), task_.scales(row), from, next);
  }
  // Does all that follows the sum of row `row`.
  void follow(std::size_t row, const byte* sum) {
    join(task_.residual_out(row), &sum, 1, task_.residual(row), task_.row_bytes);
    finish(row, task_.residual_out(row));
  }
  void finish(byte* out, byte* scales, const byte* from, const byte* next = nullptr) {
    byte* const normalised = quantise_ ? row_.data() : out;
    normalise_(normalised, from, next ? next : from, parameters_, task_.call.hidden);
    if (quantise_) quantise_(out, scales, normalised, inverse_, task_.call.hidden);
  }

 private:
  const Task& task_;
  const host::NormParameters parameters_;
  host::Join join_;
  host::Normalise normalise_;
  host::QuantiseNorm quantise_;
  std::size_t element_;
  float inverse_;
  std::vector<byte> row_;  // normalised, before it is quantised
};

}  // namespace unisono::fused
