#include "moe/arrays.hpp"

#include <cstring>

#include "host/move.hpp"

namespace unisono::moe {
void Arrays::begin(const MoeTokens& tokens, int slot, bool weighted) {
  slot_ = slot;
  epoch_ = 1 - epoch_;
  x_bytes_ = tokens.row_bytes;
  widths_.clear();
  for (const MoePayload& more : tokens.more) widths_.push_back(more.row_bytes);
  routing(slot).weighted = weighted;
}

void Arrays::finish(byte* x, MoeReceived& received) {
  const Routing& kept = routing(slot_);
  const Route& route = kept.route;
  if (dims_.layout == MoeLayout::rank_major) mark_unused_rows();
  if (dims_.expert_major()) {
    if (kept.weighted) weigh_rows();
    clear_gaps(x);
  }
  received.x = x;
  received.scales = dims_.scale_bytes > 0 ? scales() : nullptr;
  for (std::size_t m = 0; m < widths_.size(); ++m) received.more.push_back(more(m));
  received.counts = route.counts.data();
  received.offsets = route.offsets.data();
  received.source_rows = route.source_rows.data();
  if (dims_.expert_major()) {
    received.row_expert = route.row_expert.data();
    received.weights = kept.weighted ? kept.row_weights.data() : nullptr;
  } else {
    received.topk_idx = idx(slot_);
    received.expert_rows = route.expert_rows.data();
    received.weights = kept.weighted ? weights(slot_) : nullptr;
  }
  received.rows = &route.rows;
  received.dropped = &route.dropped;
  received.rows_now = at(route.rows);
}

void Arrays::mark_unused_rows() {
  const Route& route = this->route(slot_);
  const std::size_t k = at(dims_.top_k);
  for (int s = 0; s < dims_.ranks; ++s) {
    const std::size_t first = (route.first_from(s) + route.received_from(s)) * k;
    const std::size_t end = (route.first_from(s) + dims_.max_tokens) * k;
    std::fill(idx(slot_) + first, idx(slot_) + end, -1);
    std::fill(weights(slot_) + first, weights(slot_) + end, 0.0f);
  }
}

void Arrays::weigh_rows() {
  Routing& kept = routing(slot_);
  const std::size_t k = at(dims_.top_k);
  kept.row_weights.assign(dims_.rows_held, 0.0f);
  for (int s = 0; s < dims_.ranks; ++s) {
    const std::size_t first = kept.route.first_from(s), end = first + kept.route.received_from(s);
    for (std::size_t i = first * k; i < end * k; ++i)
      if (kept.route.pair_rows[i] != Route::kDropped)
        kept.row_weights[at(kept.route.pair_rows[i])] = weights(slot_)[i];
  }
}

void Arrays::clear_gaps(byte* x) {
  const Route& route = this->route(slot_);
  for (std::size_t e = 0; e < route.counts.size(); ++e) {
    const std::size_t first = at(route.offsets[e] + route.counts[e]), end = at(route.offsets[e + 1]);
    if (first == end) continue;
    const auto clear = [&](byte* array, std::size_t width) {
      std::memset(array + first * width, 0, (end - first) * width);
    };
    clear(x, x_bytes_);
    clear(scales(), dims_.scale_bytes);
    for (std::size_t m = 0; m < widths_.size(); ++m) clear(more(m), widths_[m]);
  }
}

void Arrays::sum(byte* to, const MoeOutputs& outputs, int slot, std::size_t token_row, const Range& part) {
  const auto* const y = static_cast<const byte*>(outputs.y) + part.begin;
  const Routing& kept = routing(slot);
  const float* weights = outputs.weights;
  if (!weights && kept.weighted) weights = kept.row_weights.data();
  const std::size_t k = at(dims_.top_k);
  sources_.clear();
  source_weights_.clear();
  for (std::size_t i = token_row * k; i < (token_row + 1) * k; ++i) {
    const std::int32_t row = kept.route.pair_rows[i];
    if (row == Route::kDropped) continue;
    sources_.push_back(y + at(row) * outputs.row_bytes);
    if (weights) source_weights_.push_back(weights[row]);
  }
  if (sources_.empty()) {
    std::memset(to, 0, part.bytes);
    return;
  }
  host::kernels().rows.weigh[static_cast<int>(outputs.dtype)](
      to, sources_.data(), weights ? source_weights_.data() : nullptr, static_cast<int>(sources_.size()),
      part.bytes / size_of(outputs.dtype));
}

}  // namespace unisono::moe
