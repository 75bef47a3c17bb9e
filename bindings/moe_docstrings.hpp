// The docstrings of Moe, which the type stubs carry too.
#pragma once

namespace unisono::python::doc {

constexpr const char* kMoeOf =
    R"(Makes a Moe: dispatch and combine of a mixture of experts, with all the memory that they need. Collective.

Args:
    num_experts: of all ranks; a multiple of their number. Rank r has experts r * L to r * L + L - 1, L of them.
    top_k: experts of a token; at most num_experts.
    hidden: elements of a row of x.
    max_tokens: the most tokens of one rank in one call.
    dtype: of x: float32, float16 or bfloat16.
    options: a MoeOptions; None: MoeOptions().

All arguments are the same on every rank.

Returns:
    the Moe. It keeps the communicator alive.

Raises:
    UsageError: a number or an option cannot be, or, on every rank, the ranks' arguments differ.
    ResourceError, on every rank: memory cannot be had.)";

constexpr const char* kMoeOptions =
    R"(What is the same in all calls of a Moe; see Communicator.moe.

Args:
    layout: the order of received rows.
        flat: a row for each token that has an expert here, by (source rank, token), without gaps.
        rank_major: the same, but row i of source rank r is row r * max_tokens + i.
        expert_major: a row for each (token, expert of this rank), by (expert, source rank, token, place in top-k).
    alignment: expert_major: each expert's rows begin at a multiple of it. Zeros fill the gaps.
    scales: how rows of x travel. None: as they are.
        e4m3_128: as float8_e4m3fn, with a float32 for each 128 elements: max(largest magnitude, 1e-4) / 448.
        mx: as float8_e4m3fn, with a power of two for each 128 elements, the next above, as its exponent's byte (UE8M0).
    capacity: the most rows that a rank receives, not for rank_major; None: as many as can come of tokens that name no
        expert twice.
    host_counts: of GPU memory: whether a dispatch waits for the counts, so that `rows` is an int. With flat and
        rank_major, copy engines then bring the rows of 2048 tokens of a rank and more in calls of two steps
        (dispatch_begin, combine_begin), which leaves the SMs to a matmul between. Takes twice the memory.
    drop: whether rows beyond the capacity are left out, from the end. Otherwise they are an error.
    more_bytes: the most bytes of a token's rows in further payloads, together.
    handles: how many routings are kept. A handle is valid until as many further ones have been made.
    device: cpu or cuda, where the arrays of all calls lie; None: cuda if the communicator has a GPU.)";

constexpr const char* kMoe =
    R"(Sends tokens to the ranks that have their experts (dispatch), and brings back their weighted sums (combine).

Made by Communicator.moe. Arrays are as those of the Communicator's calls, all on the CPU or all on the GPU.

Order: calls come from one thread at a time, in the same order on every rank, among the communicator's own. Between the
begin and the end of a phase the communicator makes no other call. Calls on GPU arrays only enqueue on `stream`, and a
CUDA graph may capture them.

>>> received = moe.dispatch(x, topk_idx, topk_weights)
>>> y = experts(received.x)
>>> out = moe.combine(y, received.handle)

Errors of every call, beside those of the Communicator's calls:

- UsageError: the arrays do not fit the Moe, an index is no expert, there are more tokens than max_tokens, or a handle is
  of another Moe or no longer kept. Nothing has been sent.
- ResourceError, on every rank: more rows than the capacity. Nothing has been sent. On a GPU the communicator fails.
- MismatchError: the ranks differ in what they call, in max_tokens, or in the widths of rows and payloads.)";

constexpr const char* kMoeDispatch =
    R"(Sends rows to the ranks that have their experts. Collective.

Args:
    x: (tokens, hidden), in the Moe's dtype. Without scales also (tokens, width) of any dtype, for example quantised: rows of
        at most as many bytes, the same width on every rank. Or a tuple (x, payload, ...): row t of each payload goes where
        row t of x goes. A payload is an array (tokens, ...) of any dtype and width, the same dtype and width on every rank.
    topk_idx: (tokens, top_k), int32 or int64: experts, -1 for none. None: the handle's.
    topk_weights: (tokens, top_k), float32; None: none are sent. On every rank or on none.
    handle: of an earlier dispatch, whose routing is used again. tokens, and topk_idx if it is given, are the same.
    out: for the received x, in its shape and dtype; None: the Moe's own memory.
    max_tokens: the most tokens of a rank in this call, the same on every rank; None: the Moe's. GPUs have faster kernels for
        few tokens, 128 or fewer (docs/gpu.md). Not read with a handle.

Returns:
    the MoeReceived.)";

constexpr const char* kMoeDispatchBegin =
    R"(Sends as dispatch does; dispatch_end receives. The arrays may change after dispatch_end only. Args as dispatch.)";

constexpr const char* kMoeDispatchEnd = R"(Ends the dispatch that has begun.

Returns:
    the MoeReceived.)";

constexpr const char* kMoeCombine =
    R"(Returns each token's sum to its rank. Collective.

out = round(((p_0 + p_1) + ...) + bias), in f32, over the ranks r that have received the token, in rank order. p_r is rank
r's row of y. With expert_major p_r is the sum of w * y over the token's experts there, in the order of its top-k, each
product rounded to f32, and rounded to the dtype of y at the end. A token that no rank has received gets bias as it is, or
zeros.

Args:
    y: (rows_held, width), or as many rows at least as have come; float32, float16 or bfloat16, the same on every rank. Row i
        belongs to row i of the received x. Its bytes are at most those of a row of x. In the layouts flat and rank_major
        the caller has reduced it over this rank's experts; on a GPU y written over the received x is not copied.
    handle: of the dispatch.
    topk_weights: expert_major: one float32 for each row of y; None: those that were dispatched, else ones. Otherwise None.
    bias: (tokens, width), in the dtype of y; None: none.
    out: (tokens, width), in the dtype of y; None: a new array.

Returns:
    out.)";

constexpr const char* kMoeCombineBegin =
    R"(Sends as combine does; combine_end receives. The arrays may change after combine_end only. Args as combine.)";

constexpr const char* kMoeCombineEnd = R"(Ends the combine that has begun.

Returns:
    out.)";

constexpr const char* kMoeReceived =
    R"(What a dispatch has brought: arrays of x's library in the Moe's own memory, without a copy.

x, scales and more are valid until the second dispatch after this one begins, the others as long as the handle. Arrays of
rows have rows_held rows, of which the first `rows` may be filled. On a GPU they are ready when the stream is.)";

constexpr const char* kMoeHandle =
    R"(The routing of a dispatch, for its combine and for further dispatches by the same routing.)";

}  // namespace unisono::python::doc
