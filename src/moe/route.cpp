#include "moe/route.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "unisono/error.hpp"

namespace unisono::moe {
namespace {

template <class Index>
std::int64_t entry(const void* topk_idx, std::size_t at) {
  Index value;
  std::memcpy(&value, static_cast<const byte*>(topk_idx) + at * sizeof value, sizeof value);
  return value;
}

auto reader(DType index) { return index == DType::i64 ? entry<std::int64_t> : entry<std::int32_t>; }

}  // namespace

void Route::read(const MoeTokens& tokens) {
  const auto value = reader(tokens.index);
  const std::size_t k = at(dims_.top_k);
  std::vector<std::int32_t> idx(tokens.tokens * k);
  for (std::size_t i = 0; i < idx.size(); ++i) {
    const std::int64_t expert = value(tokens.topk_idx, i);
    if (expert < -1 || expert >= dims_.experts)
      throw UsageError("topk_idx names expert " + std::to_string(expert) + " for token " +
                       std::to_string(i / k) + ", but there are " + std::to_string(dims_.experts) +
                       ": give 0 to " + std::to_string(dims_.experts - 1) + ", or -1 for none.");
    idx[i] = static_cast<std::int32_t>(expert);
  }
  idx_ = std::move(idx);
  rows_for_.assign(at(dims_.ranks), 0);
  pairs_for_.assign(at(dims_.experts), 0);
  begins_.assign(1, 0);
  hops_.clear();
  pairs_.clear();
  std::vector<std::int32_t> places(k);
  for (std::size_t t = 0; t < tokens.tokens; ++t) {
    const std::int32_t* const experts = idx_.data() + t * k;
    int n = 0;  // by rank, then by place
    for (int place = 0; place < dims_.top_k; ++place) {
      if (experts[place] < 0) continue;
      int slot = n++;
      for (; slot > 0 && dims_.rank_of(experts[places[at(slot - 1)]]) > dims_.rank_of(experts[place]); --slot)
        places[at(slot)] = places[at(slot - 1)];
      places[at(slot)] = place;
    }
    for (int i = 0; i < n; ++i) {
      const int place = places[at(i)], expert = experts[place], rank = dims_.rank_of(expert);
      const auto pair = static_cast<std::int32_t>(pairs_.size());
      if (i == 0 || hops_.back().rank != rank) hops_.push_back({rank, rows_for_[at(rank)]++, pair, pair});
      ++hops_.back().last;
      ++pairs_for_[at(expert)];
      pairs_.push_back({expert - rank * dims_.local_experts, place, kDropped});
    }
    begins_.push_back(static_cast<std::int32_t>(hops_.size()));
  }
}

void Route::check_same(const MoeTokens& tokens) const {
  if (!tokens.topk_idx) return;
  const auto value = reader(tokens.index);
  for (std::size_t i = 0; i < idx_.size(); ++i)
    if (value(tokens.topk_idx, i) != idx_[i])
      throw UsageError("topk_idx differs from the handle's for token " + std::to_string(i / at(dims_.top_k)) +
                       ": leave it out, or leave the handle out for a new routing.");
}

void Route::tell(std::span<std::int32_t> numbers) const {
  numbers[0] = static_cast<std::int32_t>(tokens());
  std::copy(rows_for_.begin(), rows_for_.end(), numbers.begin() + 1);
  if (dims_.expert_major())
    std::copy(pairs_for_.begin(), pairs_for_.end(), numbers.begin() + 1 + dims_.ranks);
}

void Route::lay_out(const std::int32_t* told, std::size_t stride) {
  const std::size_t ranks = at(dims_.ranks);
  tokens_of_.assign(ranks, 0);
  for (std::size_t s = 0; s < ranks; ++s) tokens_of_[s] = static_cast<std::size_t>(told[s * stride]);
  most_tokens_ = *std::max_element(tokens_of_.begin(), tokens_of_.end());
  rows = dropped = 0;
  lay_out_tokens(told, stride);
  if (dims_.expert_major()) lay_out_pairs(told, stride);
  source_rows.assign(ranks, 0);
  for (std::size_t s = 0; s < ranks; ++s) source_rows[s] = static_cast<std::int32_t>(received_[s]);
}

// Lays out token rows: flat packs them and drops the last ones, the other layouts have room for all.
void Route::lay_out_tokens(const std::int32_t* told, std::size_t stride) {
  const std::size_t ranks = at(dims_.ranks), me = at(dims_.rank);
  const bool packed = dims_.layout == MoeLayout::flat;
  sent_.assign(ranks, 0);
  first_there_.assign(ranks, 0);
  received_.assign(ranks, 0);
  first_here_.assign(ranks, 0);
  std::vector<std::size_t> needed(ranks, 0);
  for (std::size_t s = 0; s < ranks; ++s)
    for (std::size_t r = 0; r < ranks; ++r) {
      const auto asked = static_cast<std::size_t>(told[s * stride + 1 + r]);
      const std::size_t first = packed ? needed[r] : s * dims_.max_tokens;
      const std::size_t room = packed ? dims_.capacity - std::min(first, dims_.capacity) : asked;
      const std::size_t kept = std::min(asked, room);
      needed[r] += asked;
      if (s == me) {
        sent_[r] = kept;
        first_there_[r] = first;
      }
      if (r != me) continue;
      received_[s] = kept;
      first_here_[s] = first;
      if (kept > 0) rows = static_cast<std::int32_t>(first + kept);
      dropped += static_cast<std::int32_t>(asked - kept);
    }
  if (packed && !dims_.drop) check_room(needed);
}

// Lays out the rows of pairs: expert after expert, of each the pairs of rank after rank.
void Route::lay_out_pairs(const std::int32_t* told, std::size_t stride) {
  const std::size_t experts = at(dims_.experts), local = at(dims_.local_experts), me = at(dims_.rank);
  counts.assign(local, 0);
  offsets.assign(local + 1, 0);
  std::vector<std::size_t> needed(at(dims_.ranks), 0), next(experts, 0);
  for (std::size_t e = 0; e < experts; ++e) {
    std::size_t& end = needed[e / local];
    std::size_t pairs = 0;
    next[e] = end;
    for (std::size_t s = 0; s < at(dims_.ranks); ++s) {
      const auto of_source = static_cast<std::size_t>(told[s * stride + 1 + at(dims_.ranks) + e]);
      pairs += of_source;
      if (s < me) next[e] += of_source;
    }
    if (e / local == me) {
      const std::size_t begin = std::min(end, dims_.capacity), kept = std::min(pairs, dims_.capacity - begin);
      counts[e % local] = static_cast<std::int32_t>(kept);
      offsets[e % local] = static_cast<std::int32_t>(begin);
      dropped += static_cast<std::int32_t>(pairs - kept);
    }
    end = (end + pairs + dims_.alignment - 1) / dims_.alignment * dims_.alignment;
  }
  if (!dims_.drop) check_room(needed);
  rows = offsets[local] = static_cast<std::int32_t>(std::min(needed[me], dims_.capacity));
  for (const Hop& hop : hops_)
    for (std::int32_t p = hop.first; p < hop.last; ++p) {
      Pair& pair = pairs_[at(p)];
      const std::size_t row = next[at(hop.rank) * local + at(pair.expert)]++;
      pair.row = row < dims_.capacity ? static_cast<std::int32_t>(row) : kDropped;
    }
}

void Route::check_room(const std::vector<std::size_t>& needed) const {
  const auto most = std::max_element(needed.begin(), needed.end());
  if (*most <= dims_.capacity) return;
  throw ResourceError("rank " + std::to_string(most - needed.begin()) + " would receive " +
                      std::to_string(*most) + " rows in this dispatch, but there is room for " +
                      std::to_string(dims_.capacity) + ": give capacity=" + std::to_string(*most) +
                      " or more, or drop=True.");
}

void Route::sort(const std::int32_t* token_idx) {
  if (dims_.expert_major()) sort_pairs(token_idx);
  else sort_tokens(token_idx);
}

void Route::sort_tokens(const std::int32_t* token_idx) {
  const std::size_t k = at(dims_.top_k), local = at(dims_.local_experts);
  counts.assign(local, 0);
  offsets.assign(local + 1, 0);
  expert_rows.resize(dims_.pairs_held);
  const auto each = [&](const auto& visit) {
    for (std::size_t s = 0; s < received_.size(); ++s)
      for (std::size_t i = first_here_[s] * k; i < (first_here_[s] + received_[s]) * k; ++i)
        if (token_idx[i] >= 0) visit(at(token_idx[i]), static_cast<std::int32_t>(i / k));
  };
  each([&](std::size_t expert, std::int32_t) { ++counts[expert]; });
  std::inclusive_scan(counts.begin(), counts.end(), offsets.begin() + 1);
  std::vector<std::int32_t> next(offsets.begin(), offsets.end() - 1);
  each([&](std::size_t expert, std::int32_t row) { expert_rows[at(next[expert]++)] = row; });
}

void Route::sort_pairs(const std::int32_t* token_idx) {
  const std::size_t k = at(dims_.top_k);
  pair_rows.resize(dims_.tokens_held * k);
  row_expert.assign(dims_.rows_held, -1);
  std::vector<std::int32_t> next(offsets.begin(), offsets.end() - 1), left = counts;
  for (std::size_t s = 0; s < received_.size(); ++s)
    for (std::size_t i = first_here_[s] * k; i < (first_here_[s] + received_[s]) * k; ++i) {
      const std::int32_t expert = token_idx[i];
      pair_rows[i] = kDropped;
      if (expert < 0 || left[at(expert)] == 0) continue;
      --left[at(expert)];
      pair_rows[i] = next[at(expert)]++;
      row_expert[at(pair_rows[i])] = expert;
    }
}

}  // namespace unisono::moe
