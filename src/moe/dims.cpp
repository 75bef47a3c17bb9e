#include "moe/dims.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "unisono/error.hpp"

namespace unisono::moe {
namespace {

constexpr std::size_t kMost = std::numeric_limits<std::int32_t>::max();  // rows and pairs are counted so

[[noreturn]] void refuse(const std::string& text) { throw UsageError(text); }

void check_shape(const MoeShape& shape, int ranks) {
  if (shape.experts < 1 || shape.experts % ranks != 0)
    refuse("num_experts=" + std::to_string(shape.experts) + " cannot be divided among " +
           std::to_string(ranks) + " ranks: give a multiple of the number of ranks.");
  if (shape.top_k < 1 || shape.top_k > shape.experts)
    refuse("top_k=" + std::to_string(shape.top_k) + " of " + std::to_string(shape.experts) +
           " experts cannot be: give 1 to num_experts.");
  if (shape.hidden < 1 || shape.hidden > kMost || shape.max_tokens < 1 || shape.max_tokens > kMost)
    refuse("hidden=" + std::to_string(shape.hidden) + " and max_tokens=" + std::to_string(shape.max_tokens) +
           " cannot be: give 1 to 2^31 - 1 for each.");
  if (shape.dtype != DType::f32 && shape.dtype != DType::f16 && shape.dtype != DType::bf16)
    refuse("tokens of " + std::string(name_of(shape.dtype)) +
           " cannot be combined: use float32, float16 or bfloat16.");
}

void check_options(const MoeOptions& options) {
  const bool expert_major = options.layout == MoeLayout::expert_major;
  if (options.alignment < 1 || (options.alignment > 1 && !expert_major))
    refuse("alignment=" + std::to_string(options.alignment) +
           " cannot be: give 1 or more with layout=\"expert_major\", and 1 with another.");
  if (options.layout == MoeLayout::rank_major && (options.capacity || options.drop))
    refuse("rank_major has room for every row: leave capacity and drop out, or take another layout.");
  if (options.capacity && (*options.capacity < 1 || *options.capacity > kMost))
    refuse("capacity=" + std::to_string(*options.capacity) + " cannot be: give 1 to 2^31 - 1 rows.");
  if (options.drop && !options.capacity)
    refuse("drop=True needs a capacity beyond which rows are dropped: give capacity=.");
  if (options.handles < 1 || options.handles > 4096)
    refuse("handles=" + std::to_string(options.handles) + " cannot be kept: give 1 to 4096.");
}

}  // namespace

Dims dims_of(const MoeShape& shape, const MoeOptions& options, int rank, int ranks) {
  check_shape(shape, ranks);
  check_options(options);
  Dims d;
  d.rank = rank;
  d.ranks = ranks;
  d.experts = shape.experts;
  d.local_experts = shape.experts / ranks;
  d.top_k = shape.top_k;
  d.hidden = shape.hidden;
  d.max_tokens = shape.max_tokens;
  d.dtype = shape.dtype;
  d.layout = options.layout;
  d.scales = options.scales;
  d.alignment = static_cast<std::size_t>(options.alignment);
  d.drop = options.drop;
  d.handles = options.handles;
  d.row_bytes = shape.hidden * size_of(shape.dtype);
  d.sent_bytes = options.scales == MoeScales::none ? d.row_bytes : shape.hidden;
  const std::size_t blocks = (shape.hidden + kScaleBlock - 1) / kScaleBlock;
  if (options.scales == MoeScales::e4m3_128) d.scale_bytes = blocks * sizeof(float);
  if (options.scales == MoeScales::mx) d.scale_bytes = round_up(blocks, 4);
  d.more_bytes = options.more_bytes;
  const auto local = static_cast<std::size_t>(d.local_experts), k = static_cast<std::size_t>(d.top_k);
  d.tokens_held = static_cast<std::size_t>(ranks) * d.max_tokens;
  d.pairs_held = d.tokens_held * (d.expert_major() ? std::min(k, local) : k);
  const std::size_t gaps = d.expert_major() ? local * (d.alignment - 1) : 0;
  const std::size_t most = d.expert_major() ? d.tokens_held * k + gaps : d.tokens_held;
  d.capacity = std::min(options.capacity.value_or(d.expert_major() ? d.pairs_held + gaps : most), most);
  d.rows_held = d.capacity;
  if (d.tokens_held * k > kMost || most > kMost)
    refuse("max_tokens=" + std::to_string(d.max_tokens) + " on " + std::to_string(ranks) +
           " ranks can bring more than 2^31 - 1 rows: give fewer.");
  return d;
}

}  // namespace unisono::moe
