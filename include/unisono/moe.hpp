// Mixture of experts: tokens go to the ranks that have their experts (dispatch), and come back as a weighted
// sum (combine).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "unisono/communicator.hpp"
#include "unisono/types.hpp"
#include "unisono/version.hpp"

namespace unisono {

// The order of received rows. A token goes once to each rank that has an expert of its own.
// flat: a row for each token, by (source rank, token), without gaps.
// rank_major: the same, but the rows of source rank r begin at row r * max_tokens.
// expert_major: a row for each token and expert of this rank, by (expert, source rank, token, place in
// top-k).
enum class MoeLayout : std::uint8_t { flat, rank_major, expert_major };

// How rows of x travel. none: as they are. e4m3_128: as 8-bit floats (e4m3) with an f32 for each 128
// elements: scale = max(largest magnitude, 1e-4) / 448. mx: with a power of two in place of that f32, the
// next above, as its biased exponent in a byte (UE8M0). A block with an infinity or a NaN becomes NaN.
enum class MoeScales : std::uint8_t { none, e4m3_128, mx };

// The sizes of a layer, the same on every rank and in every call.
struct MoeShape {
  int experts = 0;             // of all ranks; a multiple of their number. Rank r has the r-th part of them
  int top_k = 0;               // experts of a token; at most `experts`
  std::size_t hidden = 0;      // elements of a row of x
  std::size_t max_tokens = 0;  // of one rank, in one call
  DType dtype = DType::bf16;   // of x, of y and of the result: f32, f16 or bf16
};

struct MoeOptions {
  MoeLayout layout = MoeLayout::flat;
  int alignment = 1;  // expert_major: each expert's rows begin at a multiple of it; zeros fill the gaps
  MoeScales scales = MoeScales::none;
  // The most rows that a rank receives, not for rank_major; none: as many as can come of tokens that name no
  // expert twice.
  std::optional<std::size_t> capacity{};
  bool drop = false;           // whether rows beyond `capacity` are left out; otherwise they are an error
  std::size_t more_bytes = 0;  // of a token's rows of further payloads, together
  int handles = 4;             // routings that are kept: a handle is valid until as many further ones
  // GPU memory: whether a dispatch waits for the counts, so that rows_now is set. With flat and rank_major,
  // copy engines then bring the rows of 2048 tokens of a rank and more in calls of two steps, which leaves
  // the SMs to other kernels. For these the Moe has twice the memory.
  bool host_counts = false;
  Memory memory = Memory::host;  // of all that calls take and give
};

// Rows that ride along: row t of `data` goes where row t of x goes.
struct MoePayload {
  const void* data = nullptr;
  std::size_t row_bytes = 0;
};

// The routing of a dispatch, for its combine and for further dispatches by the same routing.
struct MoeHandle {
  std::uint64_t moe = 0;     // the number of the Moe within its communicator
  std::uint64_t number = 0;  // of the routing, from 1
};

// One rank's part of a dispatch. Arrays are contiguous.
struct MoeTokens {
  const void* x = nullptr;  // [tokens, hidden], or rows of `row_bytes`
  std::size_t tokens = 0;
  const void* topk_idx = nullptr;  // [tokens, top_k] i32 or i64: experts; -1: none
  DType index = DType::i64;        // of topk_idx
  const float* weights = nullptr;  // [tokens, top_k]; null: none are sent
  // The most tokens of a rank in this call, the same on every rank; 0: those of the shape. GPUs have faster
  // kernels for few. Not read with a handle, whose dispatch has said it.
  std::size_t max_tokens = 0;
  std::span<const MoePayload> more{};
  // Bytes of a row of x, which then travels as it is, for example quantised: at most `hidden` elements of
  // `dtype`, and only without scales. 0: so many elements.
  std::size_t row_bytes = 0;
  void* out = nullptr;  // for MoeReceived::x, of as many rows as `rows_held` says; null: the Moe's own memory
  void* stream = nullptr;  // of GPU memory: as Call::stream
};

// The rows that have come, and how they are laid out. x, scales and more are valid until the second dispatch
// after this one begins, the rest as long as the handle. L: experts of a rank. On a GPU all of it is device
// memory, ready when the stream is.
struct MoeReceived {
  void* x = nullptr;          // [rows_held, hidden] of dtype, or of e4m3 with scales; or rows as they came
  void* scales = nullptr;     // [rows_held, blocks] f32; mx: u8, and blocks is a multiple of 4. Else null
  std::vector<void*> more{};  // [rows_held, row_bytes] each
  // flat, rank_major: [rows_held, top_k], the token's experts as numbers within this rank; -1: another
  // rank's, or none. rank_major: rows that no token fills have -1. expert_major: null.
  const std::int32_t* topk_idx = nullptr;
  // [rows_held, top_k], 0 where topk_idx is -1; expert_major: [rows_held]. Null without weights.
  const float* weights = nullptr;
  const std::int32_t* counts = nullptr;       // [L]: (token, expert) pairs of each expert of this rank
  const std::int32_t* offsets = nullptr;      // [L + 1]: where each expert's pairs begin, with alignment
  const std::int32_t* source_rows = nullptr;  // [ranks]: tokens that each rank has sent here
  // flat, rank_major: [offsets[L]], the row of each pair, by (expert, row). expert_major: null.
  const std::int32_t* expert_rows = nullptr;
  // expert_major: [rows_held], each row's expert within this rank; -1: no token fills the row. Else null.
  const std::int32_t* row_expert = nullptr;
  const std::int32_t* rows = nullptr;     // [1]: rows up to the last that a token fills
  const std::int32_t* dropped = nullptr;  // [1]: rows that were left out for want of capacity
  std::size_t rows_held = 0;              // of the buffers above
  std::optional<std::size_t>
      rows_now{};  // *rows, if the host knows it: not for GPU memory without host_counts
  MoeHandle handle{};
};

// One rank's part of a combine.
struct MoeOutputs {
  // flat, rank_major: a row for each row of MoeReceived, which the caller has reduced over this rank's
  // experts. On a GPU they travel once and are not copied if they lie where MoeReceived::x lies.
  // expert_major: a row for each row of MoeReceived.
  const void* y = nullptr;
  // Bytes of a row of y: of any number of elements of `dtype`, at most as many as a row of x has bytes.
  std::size_t row_bytes = 0;
  DType dtype = DType::bf16;  // of y, bias and out: f32, f16 or bf16
  // expert_major: [rows_held], of each row of y. null: those that were dispatched, else ones. Otherwise null.
  const float* weights = nullptr;
  const void* bias = nullptr;  // [tokens, row]; null: none
  void* out = nullptr;         // [tokens, row]
  void* stream = nullptr;
};

// Dispatch and combine of one kind of layer, with the memory that they need.
//
// Order: calls come from one thread at a time, in the same order on every rank, among the communicator's own.
// Between the begin and the end of a phase this thread makes no other call of the communicator.
//
// Bits: out = round(((p_0 + p_1) + ...) + bias) in f32 over the ranks that have received the token,
// ascending. p_r is the row of rank r; with expert_major p_r = round(w_a * y_a + w_b * y_b + ...) in f32,
// each product rounded to f32, over the token's experts of rank r in the order of its top-k. A token without
// a rank gets bias as it is, or zeros. These bits depend on which rank has which expert, and on nothing else.
//
// A call on GPU memory only enqueues, and a CUDA graph may capture it; routes may then change in place.
//
// Throws: the errors of error.hpp. UsageError, with nothing sent: an index that is no expert, more tokens
// than max_tokens, a row of x that is too wide, a handle of another Moe or of a routing that is no longer
// kept, another topk_idx than the handle's. ResourceError on every rank, with nothing sent: more rows than
// `capacity` (on a GPU the communicator fails). MismatchError: ranks differ in what they call, in max_tokens
// or in the widths of rows and payloads.
class UNISONO_API Moe {
 public:
  // Makes all memory. Collective. Throws UsageError for a shape or an option that cannot be, and
  // ResourceError on every rank if memory cannot be had.
  Moe(Communicator& communicator, const MoeShape& shape, const MoeOptions& options = {});
  ~Moe();
  Moe(Moe&&) noexcept;
  Moe& operator=(Moe&&) noexcept;

  // Sends rows to the ranks that have their experts. handle: takes the routing of an earlier dispatch, whose
  // topk_idx `tokens` has (null: the same). Collective.
  MoeReceived dispatch(const MoeTokens& tokens, const std::optional<MoeHandle>& handle = std::nullopt);
  // Does the same in two steps, sending and receiving, on every rank. `tokens` may change after the second
  // only.
  void dispatch_begin(const MoeTokens& tokens, const std::optional<MoeHandle>& handle = std::nullopt);
  MoeReceived dispatch_end();

  // Returns each token's sum to its rank. Collective.
  void combine(const MoeOutputs& outputs, const MoeHandle& handle);
  // Does the same in two steps, on every rank. `outputs` may change after the second only.
  void combine_begin(const MoeOutputs& outputs, const MoeHandle& handle);
  void combine_end();

  const MoeShape& shape() const;
  const MoeOptions& options() const;
  int local_experts() const;
  std::size_t rows_held() const;                         // rows of every received buffer
  std::size_t scale_bytes() const;                       // of a row's scales
  std::size_t tokens_of(const MoeHandle& handle) const;  // of this rank, in the dispatch

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace unisono
