#include "unisono/moe.hpp"

#include <atomic>
#include <cstring>
#include <string>

#include "moe/engine.hpp"
#include "moe/memory.hpp"

namespace unisono {
namespace {

// The Moes of this process are numbered for their handles.
std::uint64_t next_number() {
  static std::atomic<std::uint64_t> made = 0;
  return ++made;
}

// The arguments of a Moe, which are alike on every rank.
struct Asked {
  std::int32_t experts, top_k, dtype, layout, alignment, scales, drop, handles, host_counts, memory;
  std::uint64_t hidden, max_tokens, capacity, more_bytes;
  Asked(const MoeShape& shape, const MoeOptions& options) {
    std::memset(this, 0, sizeof *this);
    experts = shape.experts;
    top_k = shape.top_k;
    dtype = static_cast<int>(shape.dtype);
    layout = static_cast<int>(options.layout);
    alignment = options.alignment;
    scales = static_cast<int>(options.scales);
    drop = options.drop;
    handles = options.handles;
    host_counts = options.host_counts;
    memory = static_cast<int>(options.memory);
    hidden = shape.hidden;
    max_tokens = shape.max_tokens;
    capacity = options.capacity.value_or(0);
    more_bytes = options.more_bytes;
  }
};

}  // namespace

class [[gnu::visibility("hidden")]] Moe::Impl {
 public:
  Impl(Communicator::Impl& of, const MoeShape& asked_shape, const MoeOptions& asked_options)
      : shape(asked_shape),
        options(asked_options),
        dims(moe::dims_of(shape, options, of.rank(), of.size())),
        of_(of),
        tokens_(static_cast<std::size_t>(dims.handles)) {
    dims.number = agree();
    engine_ = options.memory == Memory::device ? moe::make_gpu_engine(of, dims, options.host_counts)
              : of.machine()                   ? moe::make_host_engine(of, dims)
                                               : moe::make_message_engine(of, dims);
  }

  const MoeShape shape;
  const MoeOptions options;
  moe::Dims dims;

  void dispatch_begin(const MoeTokens& given, const std::optional<MoeHandle>& handle, bool whole) {
    expect(Phase::idle, "dispatch");
    check(given);
    MoeTokens tokens = given;
    if (tokens.row_bytes == 0) tokens.row_bytes = dims.sent_bytes;
    if (tokens.max_tokens == 0) tokens.max_tokens = dims.max_tokens;
    if (handle) {
      check(*handle);
      if (tokens.tokens != tokens_of(*handle))
        throw UsageError("the routing is of " + std::to_string(tokens_of(*handle)) + " tokens, but x has " +
                         std::to_string(tokens.tokens) + ": give as many as were dispatched by it.");
    } else if (!tokens.topk_idx && tokens.tokens > 0) {
      throw UsageError("topk_idx is missing: give the experts of each token, or the handle of a routing.");
    }
    handle_ = handle.value_or(MoeHandle{number_, made_ + 1});
    try {
      of_.turn("moe_dispatch",
               [&] { engine_->begin_dispatch(tokens, slot(handle_), handle.has_value(), whole); });
    } catch (const ResourceError&) {  // every rank has the error, and the slot has no routing any more
      if (!handle) ++made_;
      throw;
    }
    if (!handle) ++made_;
    tokens_[static_cast<std::size_t>(slot(handle_))] = tokens.tokens;
    phase_ = Phase::dispatch;
  }

  MoeReceived dispatch_end() {
    expect(Phase::dispatch, "dispatch");
    phase_ = Phase::idle;
    MoeReceived received;
    of_.turn("moe_dispatch", [&] { engine_->end_dispatch(received); });
    received.rows_held = dims.rows_held;
    received.handle = handle_;
    return received;
  }

  void combine_begin(const MoeOutputs& outputs, const MoeHandle& handle, bool whole) {
    expect(Phase::idle, "combine");
    check(handle);
    check(outputs);
    of_.turn("moe_combine", [&] { engine_->begin_combine(outputs, slot(handle), whole); });
    phase_ = Phase::combine;
  }

  void combine_end() {
    expect(Phase::combine, "combine");
    phase_ = Phase::idle;
    of_.turn("moe_combine", [&] { engine_->end_combine(); });
  }

  std::size_t tokens_of(const MoeHandle& handle) const {
    check(handle);
    return tokens_[static_cast<std::size_t>(slot(handle))];
  }

 private:
  enum class Phase : std::uint8_t { idle, dispatch, combine };

  // Returns a number of this Moe that no other of the communicator has. Throws UsageError on every rank if
  // two ask for different shapes or options. Nothing is lost then.
  std::int32_t agree() {
    struct Said {
      Asked asked;
      std::uint64_t number;
    };
    const Said mine{{shape, options}, number_};
    std::vector<Said> all(static_cast<std::size_t>(of_.size()), mine);
    const Call call{.in = &mine, .out = all.data(), .count = sizeof mine, .dtype = DType::u8};
    of_.turn("moe", [&] { of_.run_within({Collective::all_gather, call, of_.rank(), of_.size()}); });
    for (std::size_t r = 1; r < all.size(); ++r)
      if (std::memcmp(&all[0].asked, &all[r].asked, sizeof mine.asked) != 0)
        throw UsageError("rank " + std::to_string(of_.number(static_cast<int>(r))) +
                         " makes another moe than rank " + std::to_string(of_.number(0)) +
                         ": give the same shape and options on every rank.");
    return static_cast<std::int32_t>(all[0].number);
  }

  int slot(const MoeHandle& handle) const {
    return static_cast<int>((handle.number - 1) % static_cast<std::uint64_t>(dims.handles));
  }

  void expect(Phase wanted, const char* what) const {
    if (phase_ == wanted) return;
    if (wanted == Phase::idle)
      throw UsageError(std::string(phase_ == Phase::dispatch ? "a dispatch" : "a combine") +
                       " has begun: end it before the next one.");
    throw UsageError(std::string("no ") + what + " has begun: call " + what + "_begin first.");
  }

  void check(const MoeHandle& handle) const {
    if (handle.moe != number_)
      throw UsageError("the handle is of another moe: give one that this moe's dispatch has returned.");
    if (handle.number == 0 || handle.number > made_ ||
        made_ - handle.number >= static_cast<std::uint64_t>(dims.handles))
      throw UsageError("routing " + std::to_string(handle.number) + " is no longer kept, since " +
                       std::to_string(made_ - handle.number) +
                       " came after it: make the moe with more handles.");
  }

  void check(const MoeTokens& tokens) const {
    if (tokens.tokens > dims.max_tokens)
      throw UsageError("there are " + std::to_string(tokens.tokens) + " tokens, but max_tokens is " +
                       std::to_string(dims.max_tokens) + ": give fewer, or make the moe for more.");
    if (tokens.max_tokens > dims.max_tokens)
      throw UsageError("this call's max_tokens is " + std::to_string(tokens.max_tokens) + ", the moe's " +
                       std::to_string(dims.max_tokens) + ": give at most that, or make the moe for more.");
    if (tokens.max_tokens > 0 && tokens.tokens > tokens.max_tokens)
      throw UsageError("there are " + std::to_string(tokens.tokens) +
                       " tokens, but this call's max_tokens is " + std::to_string(tokens.max_tokens) +
                       ": give the most tokens of any rank.");
    if (tokens.index != DType::i32 && tokens.index != DType::i64)
      throw UsageError("topk_idx is of " + std::string(name_of(tokens.index)) + ": use int32 or int64.");
    if (tokens.row_bytes > 0 && dims.scales != MoeScales::none)
      throw UsageError("x has rows of its own width, but this moe quantises rows of " +
                       std::string(name_of(dims.dtype)) +
                       ": leave row_bytes out, or make a moe without scales.");
    if (tokens.row_bytes > dims.row_bytes)
      throw UsageError("a row of x has " + std::to_string(tokens.row_bytes) +
                       " bytes, but the moe is made for " + std::to_string(dims.row_bytes) +
                       ": give rows of at most as many.");
    if (!tokens.x && tokens.tokens > 0) throw UsageError("x is missing: give the tokens' rows.");
    if (tokens.more.size() > moe::kMostMore)
      throw UsageError("there are " + std::to_string(tokens.more.size()) +
                       " further payloads: give at most " + std::to_string(moe::kMostMore) + ".");
    std::size_t bytes = 0;
    for (const MoePayload& more : tokens.more) bytes += more.row_bytes;
    if (bytes > dims.more_bytes)
      throw UsageError("the further payloads have " + std::to_string(bytes) +
                       " bytes a token, but more_bytes is " + std::to_string(dims.more_bytes) +
                       ": make the moe with more_bytes=" + std::to_string(bytes) + ".");
  }

  void check(const MoeOutputs& outputs) const {
    if (outputs.dtype != DType::f32 && outputs.dtype != DType::f16 && outputs.dtype != DType::bf16)
      throw UsageError("y is of " + std::string(name_of(outputs.dtype)) +
                       ": use float32, float16 or bfloat16.");
    if (outputs.row_bytes > dims.row_bytes || outputs.row_bytes % size_of(outputs.dtype) != 0)
      throw UsageError("a row of y has " + std::to_string(outputs.row_bytes) +
                       " bytes, but the moe is made for " + std::to_string(dims.row_bytes) +
                       ": give rows of at most as many.");
    if (outputs.weights && !dims.expert_major())
      throw UsageError(
          "combine weighs rows with layout=\"expert_major\" alone: weigh them before, or take that layout.");
  }

  Communicator::Impl& of_;
  const std::uint64_t number_ = next_number();
  std::uint64_t made_ = 0;  // routings
  std::vector<std::size_t> tokens_;
  std::unique_ptr<moe::Engine> engine_;
  Phase phase_ = Phase::idle;
  MoeHandle handle_;
};

Moe::Moe(Communicator& communicator, const MoeShape& shape, const MoeOptions& options)
    : impl_(std::make_unique<Impl>(*communicator.impl_, shape, options)) {}
Moe::~Moe() = default;
Moe::Moe(Moe&&) noexcept = default;
Moe& Moe::operator=(Moe&&) noexcept = default;

MoeReceived Moe::dispatch(const MoeTokens& tokens, const std::optional<MoeHandle>& handle) {
  impl_->dispatch_begin(tokens, handle, true);
  return impl_->dispatch_end();
}
void Moe::dispatch_begin(const MoeTokens& tokens, const std::optional<MoeHandle>& handle) {
  impl_->dispatch_begin(tokens, handle, false);
}
MoeReceived Moe::dispatch_end() { return impl_->dispatch_end(); }
void Moe::combine(const MoeOutputs& outputs, const MoeHandle& handle) {
  impl_->combine_begin(outputs, handle, true);
  impl_->combine_end();
}
void Moe::combine_begin(const MoeOutputs& outputs, const MoeHandle& handle) {
  impl_->combine_begin(outputs, handle, false);
}
void Moe::combine_end() { impl_->combine_end(); }

const MoeShape& Moe::shape() const { return impl_->shape; }
const MoeOptions& Moe::options() const { return impl_->options; }
int Moe::local_experts() const { return impl_->dims.local_experts; }
std::size_t Moe::rows_held() const { return impl_->dims.rows_held; }
std::size_t Moe::scale_bytes() const { return impl_->dims.scale_bytes; }
std::size_t Moe::tokens_of(const MoeHandle& handle) const { return impl_->tokens_of(handle); }

}  // namespace unisono
