// A call of ranks that share the memory of a machine, over the chunks of the lane.
#include <algorithm>
#include <functional>
#include <vector>

#include "fused/engine.hpp"
#include "host/backend.hpp"

namespace unisono::fused {
namespace {

// Bytes that are still in the cache when they are sent.
constexpr std::size_t kBlock = host::kAbreastFrom;

class HostNorm {
 public:
  HostNorm(HostThread& lane, const Task& task)
      : lane_(lane),
        channel_(lane_),
        task_(task),
        tail_(task),
        replicated_(!task.call.sharded),
        owner_finishes_(task.call.sharded || task.call.quant != NormQuant::none),
        srcs_(static_cast<std::size_t>(task.ranks)),
        dsts_(static_cast<std::size_t>(task.ranks - 1)) {
    lane_.reach_far(false);
  }

  void one_shot();
  void two_shot();

  // Returns the rows of a piece; 0: not even one has room.
  std::size_t rows_of_piece() const {
    return channel_.capacity() / std::max(task_.row_bytes, result_bytes(1));
  }

 private:
  // Returns a rank's rows of the step that begins with row `begin` of its own.
  RowRange window(int rank, std::size_t begin) const { return task_.owned_by(rank, begin, rows_of_piece()); }
  void give(std::size_t begin);
  void sum(const RowRange& mine);
  // Appends to the results that travel to each peer.
  void send(const byte* from, std::size_t bytes) {
    lane_.move(dsts_.data(), task_.ranks - 1, &from, 1, bytes);
    for (Dst& dst : dsts_) dst.at += bytes;
  }
  void finish(const RowRange& rows) {
    for (std::size_t row = rows.first; row < rows.first + rows.count; ++row)
      tail_.finish(row, task_.residual_out(row));
  }
  void take(int peer, const RowRange& theirs);
  std::size_t result_bytes(std::size_t rows) const {
    return rows * ((replicated_ ? task_.row_bytes : 0) + (owner_finishes_ ? task_.out_bytes : 0) +
                   task_.scale_bytes);
  }

  HostThread& lane_;
  ChunkChannel<HostThread> channel_;
  const Task& task_;
  Tail tail_;
  const bool replicated_;
  const bool owner_finishes_;  // and its results travel; else everyone finishes all rows
  std::vector<const byte*> srcs_;
  std::vector<Dst> dsts_;
};

// Sends x to everyone. Rows are finished as their last byte is summed.
void HostNorm::one_shot() {
  std::size_t finished = 0;
  for (Rounds r(lane_, task_.call.rows * task_.row_bytes, channel_.capacity()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    put_all(channel_, task_.x(0) + begin, bytes);
    for (int p = 0; p < task_.ranks; ++p)
      srcs_[static_cast<std::size_t>(p)] = p == task_.rank ? task_.x(0) + begin : channel_.arrived(p, bytes);
    tail_.join(task_.residual_out(0) + begin, srcs_.data(), task_.ranks, task_.residual(0) + begin, bytes);
    for (int i = 1; i < task_.ranks; ++i) channel_.release(peer_at(lane_, i));
    for (; (finished + 1) * task_.row_bytes <= begin + bytes; ++finished)
      tail_.finish(finished, task_.residual_out(finished));
  }
}

// Sends each row of x to its owner, and its result to everyone.
void HostNorm::two_shot() {
  const std::size_t block = task_.owned_by(0).count, step = rows_of_piece();
  give(0);
  for (std::size_t begin = 0; begin < block; begin += step) {
    const RowRange mine = window(task_.rank, begin);
    if (mine.count > 0) sum(mine);
    if (begin + step < block) give(begin + step);  // the rows travel while the results come in
    if (!owner_finishes_) finish(mine);
    for (int i = 1; i < task_.ranks; ++i) {
      const int p = peer_at(lane_, task_.ranks - i);
      if (const RowRange theirs = window(p, begin); theirs.count > 0) take(p, theirs);
    }
  }
}

void HostNorm::give(std::size_t begin) {
  for (int i = 1; i < task_.ranks; ++i) {
    const int p = peer_at(lane_, i);
    if (const RowRange theirs = window(p, begin); theirs.count > 0)
      channel_.put(p, task_.x(theirs.first), theirs.count * task_.row_bytes);
  }
}

// Sums this rank's own rows, and sends their results.
void HostNorm::sum(const RowRange& mine) {
  const int peers = task_.ranks - 1;
  const std::size_t bytes = mine.count * task_.row_bytes;
  for (int p = 0; p < task_.ranks; ++p)
    srcs_[static_cast<std::size_t>(p)] = p == task_.rank ? task_.x(mine.first) : channel_.arrived(p, bytes);
  for (int i = 1; i <= peers; ++i)
    dsts_[static_cast<std::size_t>(i - 1)] = channel_.reserve(peer_at(lane_, i), result_bytes(mine.count));
  for (std::size_t at = 0; at < bytes; at += kBlock) {
    const std::size_t length = std::min(kBlock, bytes - at);
    byte* const sums = task_.residual_out(mine.first) + at;
    tail_.join(sums, srcs_.data(), task_.ranks, task_.residual(mine.first) + at, length);
    if (replicated_) send(sums, length);
    for (const byte*& src : srcs_) src += length;
  }
  for (int i = 1; i <= peers; ++i) channel_.release(peer_at(lane_, i));
  if (owner_finishes_) {
    finish(mine);
    send(task_.out(mine.first), mine.count * task_.out_bytes);
  }
  if (task_.scale_bytes > 0) send(task_.scales(mine.first), mine.count * task_.scale_bytes);
  for (int i = 1; i <= peers; ++i) channel_.commit(peer_at(lane_, i), result_bytes(mine.count));
}

// Takes the results of a peer's rows: residual_out, out, scales.
void HostNorm::take(int peer, const RowRange& theirs) {
  const byte* from = channel_.arrived(peer, result_bytes(theirs.count));
  const auto receive = [&](byte* to, std::size_t bytes) {
    const Dst dst{to};
    lane_.move(&dst, 1, &from, 1, bytes);
    from += bytes;
  };
  if (owner_finishes_) {
    if (replicated_) receive(task_.residual_out(theirs.first), theirs.count * task_.row_bytes);
    receive(task_.out(theirs.first), theirs.count * task_.out_bytes);
    if (task_.scale_bytes > 0) receive(task_.scales(theirs.first), theirs.count * task_.scale_bytes);
  } else {
    const std::size_t end = theirs.first + theirs.count;
    for (std::size_t row = theirs.first; row < end; ++row) {
      receive(task_.residual_out(row), task_.row_bytes);  // to the first-level cache
      tail_.finish(row, task_.residual_out(row), row + 1 < end ? from : nullptr);
    }
  }
  channel_.release(peer);
}

// Returns the algorithm that such a call always takes; automatic: the plan's. Codes and scales go by chunks.
Algorithm needed(LocalCommunicator& machine, const Task& task) {
  if (task.call.algorithm == NormAlgorithm::one_shot) return Algorithm::one_shot;
  if (task.call.algorithm == NormAlgorithm::two_shot) return Algorithm::two_shot;
  // some rank would own no row, and one step is faster
  if (task.call.rows < static_cast<std::size_t>(task.ranks) && !task.call.sharded) return Algorithm::one_shot;
  if (task.call.quant == NormQuant::none) return Algorithm::automatic;
  const Algorithm planned = by_plan(machine, task);
  return is_direct(planned) ? Algorithm::two_shot : planned;
}

void run_by_chunks(LocalCommunicator& machine, const Task& task, Algorithm algorithm) {
  HostNorm norm(machine.group().lane(), task);
  if (algorithm == Algorithm::one_shot && !task.call.sharded) norm.one_shot();
  else if (norm.rows_of_piece() > 0) norm.two_shot();
  else run_composed(machine, task);
}

}  // namespace

void run_on_machine(LocalCommunicator& machine, const Task& task) {
  Group& group = machine.group();
  group.lane().mark(Asked(task).mark());
  const NormCall& norm = task.call;
  if (const Algorithm algorithm = needed(machine, task); algorithm != Algorithm::automatic) {
    group.will_move(norm.rows * task.row_bytes, algorithm);
    return run_by_chunks(machine, task, algorithm);
  }
  const Call call{.in = norm.x,
                  .out = norm.sharded ? norm.out : norm.residual_out,
                  .count = norm.rows * norm.hidden,
                  .dtype = norm.dtype};
  Request request(Collective::all_reduce_rms_norm, call, task.rank, task.ranks);
  const auto program = [&] {
    if (is_direct(request.algorithm)) run_direct(group.lane(), task, request.args);
    else run_by_chunks(machine, task, request.algorithm);
  };
  machine.run_planned(request, std::ref(program));
}

}  // namespace unisono::fused
