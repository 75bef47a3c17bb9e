// A call of ranks that reach each other's arrays: in memory that they share, or by the kernel's copies.
#include <algorithm>
#include <vector>

#include "fused/engine.hpp"
#include "host/host_thread.hpp"

namespace unisono::fused {
namespace {

// Bytes of a rank's rows of a step, which stay in the second-level cache until they are finished.
constexpr std::size_t kStep = std::size_t{256} << 10;
// Bytes that are summed at once. Their peers have read the results of the last call, so that a rank first
// asks for the lines of the next ones.
constexpr std::size_t kJoined = 4096;
// Bytes of rows that are taken at once: they stay in the first-level cache, except if each copy is a call of
// the kernel.
constexpr std::size_t kTaken = std::size_t{16} << 10, kTakenFar = std::size_t{64} << 10;

class DirectNorm {
 public:
  DirectNorm(HostThread& lane, const Task& task, const Args& args)
      : lane_(lane), task_(task), args_(args), tail_(task), srcs_(static_cast<std::size_t>(task.ranks)) {}

  void run();

 private:
  void join(const RowRange& mine);
  void take(int peer, const RowRange& theirs);
  // next: as many rows, which are read next; null: none.
  void finish(const RowRange& rows, const byte* next = nullptr) {
    for (std::size_t row = rows.first; row < rows.first + rows.count; ++row) {
      tail_.finish(row, task_.residual_out(row), next);
      if (next) next += task_.row_bytes;
    }
  }
  // Returns what travels of a row.
  byte* result(std::size_t row) const {
    return task_.call.sharded ? task_.out(row) : task_.residual_out(row);
  }
  std::size_t rows_in(std::size_t bytes) const { return std::max<std::size_t>(bytes / task_.row_bytes, 1); }

  HostThread& lane_;
  const Task& task_;
  const Args& args_;
  Tail tail_;
  std::vector<const byte*> srcs_;
};

// The owner of a row reads it from all, and everyone reads the result from its owner.
void DirectNorm::run() {
  const int n = task_.ranks;
  const std::size_t block = task_.owned_by(0).count, step = rows_in(kStep);
  for (std::size_t begin = 0; begin < block; begin += step) {
    const RowRange mine = task_.owned_by(task_.rank, begin, step);
    join(mine);
    if (task_.call.sharded) finish(mine);
    for (int i = 1; i < n; ++i) lane_.signal(peer_at(lane_, i), Slot::meet);
    if (!task_.call.sharded) finish(mine);
    for (int i = 1; i < n; ++i) {
      const int p = peer_at(lane_, n - i);
      lane_.wait(p, Slot::meet);
      take(p, task_.owned_by(p, begin, step));
    }
  }
  meet(lane_);  // the peers have read the results of this rank
}

void DirectNorm::join(const RowRange& mine) {
  byte* const sums = task_.residual_out(mine.first);
  const byte* const residual = task_.residual(mine.first);
  const std::size_t first = mine.first * task_.row_bytes, bytes = mine.count * task_.row_bytes;
  const std::size_t block = lane_.copies_far() ? HostThread::kNearBytes : kJoined;
  for (std::size_t at = 0; at < bytes; at += block) {
    const std::size_t length = std::min(block, bytes - at);
    for (int p = 0; p < task_.ranks; ++p)
      srcs_[static_cast<std::size_t>(p)] = lane_.near(p, args_.inputs[p] + first + at, length);
    for (std::size_t line = 0; line < length; line += sizeof(host::Line)) host::own(sums + at + line);
    tail_.join(sums + at, srcs_.data(), task_.ranks, residual + at, length);
  }
}

void DirectNorm::take(int peer, const RowRange& theirs) {
  const std::size_t most = rows_in(lane_.copies_far() ? kTakenFar : kTaken),
                    end = theirs.first + theirs.count;
  for (std::size_t row = theirs.first; row < end; row += most) {
    const RowRange some{row, std::min(most, end - row)};
    const byte* const from = args_.outputs[peer] + row * task_.row_bytes;
    const Dst to{result(row)};
    const std::size_t bytes = some.count * task_.row_bytes;
    lane_.move(&to, 1, &from, 1, bytes);
    const bool more = row + 2 * most <= end && !lane_.copies_far();
    if (!task_.call.sharded) finish(some, more ? from + bytes : nullptr);
  }
}

}  // namespace

void run_direct(HostThread& lane, const Task& task, const Args& args) { DirectNorm(lane, task, args).run(); }

}  // namespace unisono::fused
