#include "moe/cuda/layout.hpp"

#include <algorithm>

namespace unisono::moe::gpu {

Space::Space(const Dims& dims, std::size_t few_blocks, bool copies) {
  const auto at = [](std::size_t& next, std::size_t bytes) {
    const std::size_t here = next;
    next = round_up(next + bytes, 256);
    return here;
  };
  const auto ranks = static_cast<std::size_t>(dims.ranks), k = static_cast<std::size_t>(dims.top_k);
  const auto local = static_cast<std::size_t>(dims.local_experts);
  constexpr std::size_t word = sizeof(std::int32_t), kNumber = sizeof(std::uint64_t) / kNumbersOfWord;
  chunks = dims.ranks > 1 && dims.max_tokens >= 1024 ? kMostChunks : 1;
  columns = columns_of(dims, chunks);
  const bool pairs = dims.expert_major();
  std::size_t& slot = slot_bytes;
  matrix = at(slot, ranks * columns * word);
  topk_idx = at(slot, pairs ? 0 : dims.rows_held * k * word);
  weights = at(slot, dims.rows_held * (pairs ? 1 : k) * word);
  weighted = at(slot, ranks * word);
  pair_rows = at(slot, pairs ? dims.tokens_held * k * word : 0);
  expert_rows = at(slot, pairs ? 0 : dims.pairs_held * word);
  row_expert = at(slot, pairs ? dims.rows_held * word : 0);
  counts = at(slot, local * word);
  offsets = at(slot, (local + 1) * word);
  source_rows = at(slot, ranks * word);
  rows = at(slot, word);
  dropped = at(slot, word);
  first_rows = at(slot, ranks * word);
  first_there = at(slot, ranks * word);
  experts = at(slot, dims.max_tokens * k * word);
  places = at(slot, dims.max_tokens * k * word);
  homes = at(slot, dims.max_tokens * k * word);
  leaving = dims.rows_held;
  pool_rows = leaving + (copies ? dims.tokens_held : 0);
  at(pool_bytes, pool_rows * dims.sent_bytes);
  scales = at(pool_bytes, pool_rows * dims.scale_bytes);
  more = at(pool_bytes, pool_rows * dims.more_bytes + kMostMore * 256);
  if (few_blocks > 0) {
    const std::size_t of_token = pairs ? kBlocksOfToken : kBlocksOfTokenByRank;
    few_tokens = std::min(std::max<std::size_t>(few_blocks / of_token, 1), dims.max_tokens);
    const std::size_t few_rows = std::min(kFewSums, few_blocks * (pairs ? kFewSumsOfBlock : kRowsOfBlock));
    few_sums_tokens = std::min({kFewSumsTokens, few_rows / std::min(ranks, k), dims.max_tokens});
    at_once_tokens = std::min({kTokensAtOnce, few_blocks * kTokensOfBlock, dims.max_tokens});
    rank_lines = lines_of((1 + ranks) * kNumber);
    told_lines = rank_lines + lines_of(static_cast<std::size_t>(dims.experts) * kNumber);
    at(told_bytes, ranks * told_lines * kLine);
    row_lines =
        lines_of(2 * k * word) +
        (dims.scales == MoeScales::none ? lines_of(dims.sent_bytes) : units_of(dims.hidden) * kLinesOfUnit) +
        dims.more_bytes / (kWordsOfLine * 8) + std::min(dims.more_bytes, kMostMore);
    at(sent_bytes, ranks * few_tokens * row_lines * kLine);
    sum_lines = lines_of(dims.row_bytes);
    at(few_sums_bytes, ranks * few_sums_tokens * sum_lines * kLine);
  }
  at(sums_bytes, dims.ranks > 1 && few_sums_tokens < dims.max_tokens ? dims.tokens_held * dims.row_bytes : 0);
  counters = at(bytes, sizeof(Counters));
  totals = at(bytes, kRouteBlocks * columns * sizeof(std::uint64_t));
  slots = at(bytes, static_cast<std::size_t>(dims.handles) * slot_bytes);
  pool = at(bytes, kEpochs * pool_bytes);
  told = at(bytes, 2 * told_bytes);
  sent = at(bytes, 2 * sent_bytes);
  sums = at(bytes, 2 * sums_bytes);
  few_sums = at(bytes, 2 * few_sums_bytes);
  lent = at(bytes, 2 * ranks * sizeof(Lent));
  if (!copies) return;
  at(returned_bytes, dims.tokens_held * dims.row_bytes);
  returned = at(bytes, 2 * returned_bytes);
}

}  // namespace unisono::moe::gpu
