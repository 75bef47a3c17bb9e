#include "fused/cuda/norm_form.hpp"

#include <algorithm>
#include <bit>

#include "cuda/engine.hpp"
#include "cuda/layout.hpp"

namespace unisono::fused {
namespace {

constexpr std::size_t kLeastPart = 1024;  // bytes of a row, of each block of a cluster
constexpr std::size_t kLongest = cuda::kMaxThreads * cuda::kLineUnit;  // bytes of a message by lines
constexpr std::size_t kFewestOwned =
    10;  // rows of an owner for which a second step pays (docs/notes/fused.md)
constexpr std::size_t kMostOfBlock = std::size_t{14} << 10;  // bytes of all ranks, where blocks are few
// Bytes that a row has at least for each of its messages, and beside these, where rows are more than blocks.
constexpr std::size_t kLeastOfMessage = 4608, kLeastBeside = 1024;

// Returns how many blocks of a cluster share a row: whole words, of which messages are made. Clusters that
// leave a quarter of a GPU free are faster than twice as large ones. Two blocks take all of a GPU for rows of
// more messages than one block holds in registers, two of 16-bit elements (docs/notes/fused.md).
unsigned cluster_of(const Task& task, const Cut& cut, std::size_t most_blocks) {
  const std::size_t hidden = task.call.hidden, most = 3 * std::size_t{cuda::kMostBlocks} / 4;
  const std::size_t of_block = task.call.dtype == DType::f32 ? kLongest : 2 * kLongest;
  const bool long_rows = cut.lines && !cut.two_steps && task.row_bytes > of_block && hidden > gpu::kNotShort;
  unsigned cluster = task.row_bytes % cuda::kPacketBytes == 0 ? 8 : 1;
  const auto pays = [&] {
    const bool on_all = cluster == 2 && long_rows;
    return cut.steps * cluster <= (on_all ? most_blocks : std::min(most_blocks, most)) &&
           task.row_bytes >= cluster * kLeastPart && norm::kPartials - norm::kPartials / cluster < hidden;
  };
  while (cluster > 1 && !pays()) cluster /= 2;
  return cluster;
}

// Returns whether a kernel that may take all SMs, and does not hold rows in registers, pays where the plan
// names it. One step by lines was planned by one width of rows: the calls apart take less of f32 in more than
// one message, and of more rows than clusters where messages are half empty, or where a fifth of the clusters
// has no row at last (docs/notes/fused.md).
bool pays_with_all_sms(const Task& task, const Cut& cut, Algorithm planned) {
  if (planned != Algorithm::one_shot_ll128) return true;
  const std::size_t rows = task.call.rows, turns = (rows + cut.teams - 1) / cut.teams;
  if (task.call.dtype == DType::f32) return turns == 1 && cut.messages == 1;
  const bool full = task.row_bytes >= cut.messages * kLeastOfMessage + kLeastBeside;
  return turns == 1 || (full && 5 * rows >= 4 * turns * cut.teams);
}

// Returns whether one that has few blocks pays: if they have few bytes.
bool pays_with_few_blocks(const Task& task, std::size_t blocks) {
  return task.call.rows * task.row_bytes * static_cast<std::size_t>(task.ranks) / blocks <= kMostOfBlock;
}

}  // namespace

bool can_run_apart(const Task& task) {
  const NormCall& call = task.call;
  return call.quant == NormQuant::none || call.residual_out != call.residual;
}

bool short_rows(const NormCall& call, host::Norm kind) {
  return call.hidden > gpu::kNotShort && call.hidden <= gpu::kMostShort && kind == host::Norm::rms;
}

unsigned held_bytes(const Task& task, unsigned elements, std::size_t rows) {
  const std::size_t bytes = round_up(elements * size_of(task.call.dtype), 32);
  return rows * bytes <= gpu::kMostShared ? static_cast<unsigned>(bytes) : 0;
}

Cut cut_of(const Task& task, const Gpus& gpus, Algorithm algorithm) {
  Cut cut{};
  cut.lines = is_lines(algorithm);
  cut.two_steps = form_of(algorithm) == Algorithm::two_shot &&
                  (task.call.algorithm != NormAlgorithm::automatic || task.owned_by(0).count >= kFewestOwned);
  cut.steps = cut.two_steps ? task.owned_by(0).count : task.call.rows;
  cut.at_a_time = cut.two_steps ? static_cast<std::size_t>(task.ranks) : 1;
  cut.cluster = cluster_of(task, cut, gpus.clusters ? gpus.most_blocks : 0);
  cut.bits = gpu::kRowBits - static_cast<unsigned>(std::countr_zero(cut.cluster));
  const gpu::Share largest(0, cut.bits, static_cast<unsigned>(task.call.hidden));
  cut.row_bytes = held_bytes(task, largest.count, cut.at_a_time);
  const std::size_t of_thread = cut.lines ? cuda::kLineUnit : cuda::kPacketBytes;
  const std::size_t share_bytes = largest.count * size_of(task.call.dtype);
  const std::size_t wanted = round_up((share_bytes + of_thread - 1) / of_thread, 32);
  cut.threads = std::clamp(static_cast<int>(wanted), gpu::kFewestThreads, cuda::kMaxThreads);
  cut.piece_bytes = static_cast<std::size_t>(cut.threads) * of_thread;
  cut.teams = std::min(cut.steps, gpus.most_blocks / cut.cluster);
  cut.messages = static_cast<unsigned>((share_bytes + cut.piece_bytes - 1) / cut.piece_bytes);
  cut.in_registers =
      !cut.two_steps && cut.teams == task.call.rows && cut.row_bytes != 0 &&
      short_rows(task.call, task.kind) &&
      gpu::is_short(cut.lines, size_of(task.call.dtype), task.ranks, cut.cluster, cut.messages);
  return cut;
}

// The rest after an all_reduce takes all SMs, where a fused kernel has no more than its ranks may take. It
// pays if it holds rows in registers (docs/notes/fused.md).
Algorithm algorithm_of(const Task& task, const Gpus& gpus, Algorithm planned) {
  if (task.ranks == 1 || task.ranks > cuda::kFewRanks) return Algorithm::automatic;
  switch (task.call.algorithm) {
    case NormAlgorithm::automatic: break;
    case NormAlgorithm::one_shot: return Algorithm::one_shot_packets;
    case NormAlgorithm::one_shot_ll128: return Algorithm::one_shot_ll128;
    case NormAlgorithm::two_shot: return Algorithm::two_shot_packets;
    case NormAlgorithm::two_shot_ll128: return Algorithm::two_shot_ll128;
    case NormAlgorithm::apart: return Algorithm::automatic;
  }
  const bool fused = !runs_apart(planned), all_sms = gpus.most_blocks >= cuda::kMostBlocks;
  const bool must = !can_run_apart(task);
  if (!fused && ((all_sms && !must) || !gpus.nvlink)) return planned;
  const Algorithm in_one = fused ? planned : Algorithm::one_shot_ll128;
  const Cut cut = cut_of(task, gpus, in_one);
  if (must || cut.in_registers) return in_one;
  const bool pays =
      all_sms ? pays_with_all_sms(task, cut, planned) : fused && pays_with_few_blocks(task, gpus.most_blocks);
  return pays ? in_one : Algorithm::automatic;
}

}  // namespace unisono::fused
