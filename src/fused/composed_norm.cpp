// A call as an all_reduce, followed by the rest on every rank. With a sharded residual each rank does the
// rest for its own rows, and an all_gather brings the rows together.
#include <cstring>
#include <vector>

#include "fused/engine.hpp"

namespace unisono::fused {
namespace {

void collective(Communicator::Impl& impl, Collective which, const Call& call) {
  impl.run_within({which, call, impl.rank(), impl.size()});
}

void finish_sharded(Communicator::Impl& impl, const Task& task, const byte* sums) {
  Tail tail(task);
  // of a block: rows of out, then their scales
  const std::size_t rows = task.owned_by(0).count, scales_at = rows * task.out_bytes;
  const std::size_t block = scales_at + rows * task.scale_bytes;
  std::vector<byte> mine(block), all(block * static_cast<std::size_t>(task.ranks));
  for (std::size_t i = 0; i < task.held.count; ++i) {
    const std::size_t row = task.held.first + i;
    const byte* const sum = sums + row * task.row_bytes;
    tail.join(task.residual_out(row), &sum, 1, task.residual(row), task.row_bytes);
    tail.finish(mine.data() + i * task.out_bytes, mine.data() + scales_at + i * task.scale_bytes,
                task.residual_out(row));
  }
  collective(impl, Collective::all_gather,
             {.in = mine.data(), .out = all.data(), .count = block, .dtype = DType::u8});
  for (int p = 0; p < task.ranks; ++p) {
    const RowRange theirs = task.owned_by(p);
    if (theirs.count == 0) continue;
    const byte* const from = all.data() + static_cast<std::size_t>(p) * block;
    std::memcpy(task.out(theirs.first), from, theirs.count * task.out_bytes);
    if (task.scale_bytes > 0)
      std::memcpy(task.scales(theirs.first), from + scales_at, theirs.count * task.scale_bytes);
  }
}

}  // namespace

void run_composed(Communicator::Impl& impl, const Task& task) {
  const NormCall& call = task.call;
  const bool in_out = call.quant == NormQuant::none && call.out != call.residual;
  std::vector<byte> other(in_out ? 0 : call.rows * task.row_bytes);
  byte* const sums = in_out ? task.out(0) : other.data();
  collective(impl, Collective::all_reduce,
             {.in = call.x, .out = sums, .count = call.rows * call.hidden, .dtype = call.dtype});
  if (call.sharded) return finish_sharded(impl, task, sums);
  Tail tail(task);
  for (std::size_t row = 0; row < call.rows; ++row) tail.follow(row, sums + row * task.row_bytes);
}

}  // namespace unisono::fused
