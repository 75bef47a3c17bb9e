#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/env.hpp"
#include "cuda/api.hpp"
#include "cuda/engine.hpp"
#include "moe/cuda/gpu_engine.hpp"
#include "moe/told.hpp"
#include "unisono/error.hpp"

namespace unisono::moe {
namespace {

// Returns the widest word that divides addresses and sizes.
int word_of(std::uintptr_t all) { return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1; }

// Says what kernels report of a call that cannot be, as the host's engine does.
Failure explain(const device::Failure& record) {
  if (record.problem == static_cast<std::uint32_t>(gpu::Problem::index))
    return {FailureKind::usage, "topk_idx names expert " +
                                    std::to_string(static_cast<std::int32_t>(record.seen)) + " for token " +
                                    std::to_string(record.call) + ", but there are " +
                                    std::to_string(record.expected) + ": give 0 to " +
                                    std::to_string(record.expected - 1) + ", or -1 for none."};
  return {FailureKind::resource,
          "rank " + std::to_string(record.call) + " would receive " + std::to_string(record.seen) +
              " rows in this dispatch, but there is room for " + std::to_string(record.expected) +
              ": give capacity=" + std::to_string(record.seen) + " or more, or drop=True."};
}

constexpr std::size_t kTokensOfRoute = 256;  // that a block of the kernel of routes takes, if they are few

// Returns the layout of a moe on a GPU whose blocks have so much shared memory. A kernel has at most `blocks`
// of them.
gpu::Space space_of(const Dims& dims, std::size_t shared, std::size_t blocks, bool copies) {
  if (dims.ranks > 1 && env().moe_low_latency) {
    gpu::Space few(dims, blocks, copies);
    if (gpu::at_once_shared_bytes(dims, few) > shared) few.at_once_tokens = 0;
    if (gpu::low_latency_shared_bytes(dims, few) <= shared) return few;
  }
  return {dims, 0, copies};
}

int device_of(Communicator::Impl& impl) {
  if (const auto device = impl.device()) return *device;
  throw UsageError(
      "a moe on GPU memory needs a communicator with a GPU: make it with device=, on every rank.");
}

}  // namespace

GpuEngine::GpuEngine(Communicator::Impl& impl, const Dims& dims, bool host_counts)
    : impl_(impl), device_(device_of(impl)), routings_(static_cast<std::size_t>(dims.handles)) {
  if (dims.top_k > gpu::kMostTopK || dims.max_tokens > std::size_t{1} << gpu::kPositionBits)
    throw UsageError("top_k=" + std::to_string(dims.top_k) +
                     " and max_tokens=" + std::to_string(dims.max_tokens) +
                     " are too many for GPUs: give at most " + std::to_string(gpu::kMostTopK) + " and 2^24.");
  work_.dims = dims;
  const cuda::OnDevice on(device_);
  load(host_counts && dims.ranks > 1 && !dims.expert_major() && dims.max_tokens >= gpu::kManyTokens);
  AreaParts area = impl.make_area(work_.space.bytes, gpu::kTold * dims.ranks, "a moe", explain);
  memory_ = std::move(area.memory);
  work_.area = area.handle;
  work_.own = static_cast<byte*>(area.handle.memory[dims.rank]);
  work_.status = area.handle.status[dims.rank];
  if (host_counts) copies_ = std::make_unique<Copies>(work_);
}

void GpuEngine::load(bool copies) {
  int shared = 0;
  cuda::check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device_), "asking for SMs");
  cuda::check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_),
              "asking for shared memory");
  work_.space = space_of(work_.dims, static_cast<std::size_t>(shared),
                         static_cast<std::size_t>(impl_.gpu()->most_blocks()), copies);
  if (gpu::route_shared_bytes(work_.space) > gpu::load_route())
    throw UsageError("num_experts=" + std::to_string(work_.dims.experts) + " on " +
                     std::to_string(work_.dims.ranks) +
                     " ranks are too many for this GPU's kernel of routes: give fewer experts.");
  gpu::load_sort();
  if (work_.space.few_tokens > 0) {
    gpu::load_low_latency_dispatch(work_.dims);
    gpu::load_low_latency_combine();
    gpu::load_at_once(work_.dims, work_.space);
  }
  gpu::load_dispatch(work_.dims, send_blocks_, bulk_);
  gpu::load_combine(work_.dims, sum_blocks_);
}

void GpuEngine::take(int slot) {
  const Routing& routing = routings_[static_cast<std::size_t>(slot)];
  slot_ = slot;
  work_.slot = work_.space.slot(slot);
  work_.tokens = routing.tokens;
  most_ = routing.most;
  most_blocks_ = impl_.take_gpu(stream_);
}

void GpuEngine::compare(const MoeTokens& tokens, int slot, bool routed) {
  const Dims& d = work_.dims;
  if (!impl_.check() || d.ranks == 1) return;
  Told told(d);
  told.tell(tokens, slot, routed, Route(d));
  const Call call{.in = told.mine(), .out = told.all(), .count = told.bytes(), .dtype = DType::u8};
  impl_.run_within({Collective::all_gather, call, d.rank, d.ranks});
  told.compare(impl_);
}

void GpuEngine::begin_dispatch(const MoeTokens& tokens, int slot, bool routed, bool whole) {
  const cuda::OnDevice on(device_);
  compare(tokens, slot, routed);
  stream_ = static_cast<cudaStream_t>(tokens.stream);
  if (!routed)
    routings_[static_cast<std::size_t>(slot)] = {static_cast<std::uint32_t>(tokens.tokens),
                                                 tokens.max_tokens};
  take(slot);
  work_.epoch = 1 - work_.epoch;
  dispatch_ = {};
  dispatch_.tokens = work_.tokens;
  dispatch_.routed = routed;
  dispatch_.copies = many() && !whole;
  const bool one_kernel = few() || (at_once() && !routed);
  dispatch_.lands = whole && work_.dims.ranks > 1 && (one_kernel || !work_.dims.expert_major());
  dispatch_.weights = tokens.weights;
  dispatch_.topk_idx = tokens.topk_idx;
  dispatch_.wide_index = tokens.index == DType::i64;
  either_ = work_.dims.ranks > 1 && tokens.tokens == 0;
  lay_payloads(tokens);
  if (few())
    return check(gpu::low_latency_dispatch(work_, dispatch_, blocks_for_few(entries_to_fill()), stream_));
  const int senders = std::min(blocks(send_blocks_), blocks_to_send());
  if (!routed && at_once()) {
    const int all = work_.dims.expert_major() ? std::max(senders, blocks_for_rows())
                                              : std::min(senders + 1, most_blocks_);  // one sets tables
    return check(gpu::dispatch_at_once(work_, dispatch_, all, stream_));
  }
  if (!routed)
    check(
        gpu::route(work_, tokens.topk_idx, tokens.index, std::min(most_blocks_, blocks_to_route()), stream_));
  if (dispatch_.copies) return send_by_copies();
  check(gpu::send(work_, dispatch_, senders, stream_));
}

// Several blocks share the tokens, and one more tells of them.
int GpuEngine::blocks_to_route() const {
  const int blocks = std::min(gpu::kRouteBlocks, blocks_of(work_.tokens, kTokensOfRoute));
  return blocks > 1 ? blocks + 1 : 1;
}

std::size_t GpuEngine::entries_to_fill() const {
  const Dims& d = work_.dims;
  if (dispatch_.routed || d.layout == MoeLayout::flat) return 0;
  return d.rows_held * (d.expert_major() ? 1 : static_cast<std::size_t>(d.top_k));
}

// A token keeps a block busy, as in a combine. Entries without a token are filled by all threads.
int GpuEngine::blocks_to_send() const {
  const Dims& d = work_.dims;
  std::size_t gaps = 0;
  if (d.alignment > 1) gaps = static_cast<std::size_t>(d.local_experts) * d.alignment;
  return std::max(
      {blocks_of(work_.tokens, 1), blocks_of(entries_to_fill(), kEntries), blocks_of(gaps, gpu::kWarps)});
}

// Sets where rows come from, and where they go. To the caller's memory x goes at once if no peer writes it.
void GpuEngine::lay_payloads(const MoeTokens& tokens) {
  const Dims& d = work_.dims;
  const bool scaled = d.scales != MoeScales::none;
  out_ = tokens.out;
  const std::size_t pool = work_.space.x(work_.epoch);
  std::size_t to = pool;
  if (out_ && (d.ranks == 1 || few())) to = offset(out_);
  else dispatch_.out = static_cast<byte*>(out_);
  const std::size_t from = number(tokens.x);
  gpu::Payloads& all = dispatch_.payloads;
  all.of[all.count++] = {static_cast<const byte*>(tokens.x), to, static_cast<std::uint32_t>(tokens.row_bytes),
                         word_of((scaled ? 0 : from) | to | tokens.row_bytes)};
  dispatch_.wide = scaled && (from | d.row_bytes) % 16 == 0 &&
                   (to | d.sent_bytes) % (d.row_bytes == d.hidden * 4 ? 4 : 8) == 0;
  dispatch_.bulk = bulk_ && all.of[0].word == 16 && all.of[0].bytes > 0 && (!scaled || dispatch_.wide);
  to = pool + work_.space.more;
  for (const MoePayload& more : tokens.more) {
    all.of[all.count++] = {static_cast<const byte*>(more.data), to,
                           static_cast<std::uint32_t>(more.row_bytes),
                           word_of(number(more.data) | more.row_bytes)};
    to += round_up(work_.space.pool_rows * more.row_bytes, 256);
  }
}

void GpuEngine::end_dispatch(MoeReceived& received) {
  const cuda::OnDevice on(device_);
  const Dims& d = work_.dims;
  const gpu::Space& s = work_.space;
  impl_.take_gpu(stream_);
  if (few() && !dispatch_.lands) {
    dispatch_.sends = false;
    dispatch_.lands = true;
    check(gpu::low_latency_dispatch(work_, dispatch_, blocks_for_few(entries_to_fill()), stream_));
  } else if (d.ranks > 1 && !few()) {
    check(gpu::land(work_, dispatch_, blocks_for_rows(), stream_));
  }
  if (d.layout == MoeLayout::flat && d.drop && !dispatch_.routed) check(gpu::sort(work_, stream_));
  const std::size_t pool = s.x(work_.epoch);
  received.x = out_ ? out_ : mine<void>(pool);
  received.scales = d.scale_bytes > 0 ? mine<void>(pool + s.scales) : nullptr;
  for (int p = 1; p < dispatch_.payloads.count; ++p)
    received.more.push_back(mine<void>(dispatch_.payloads.of[p].to));
  received.counts = table<std::int32_t>(s.counts);
  received.offsets = table<std::int32_t>(s.offsets);
  received.source_rows = table<std::int32_t>(s.source_rows);
  if (dispatch_.weights || either_) received.weights = table<float>(s.weights);
  if (d.expert_major()) {
    received.row_expert = table<std::int32_t>(s.row_expert);
  } else {
    received.topk_idx = table<std::int32_t>(s.topk_idx);
    received.expert_rows = table<std::int32_t>(s.expert_rows);
  }
  received.rows = table<std::int32_t>(s.rows);
  received.dropped = table<std::int32_t>(s.dropped);
  if (!copies_) return;
  if (dispatch_.copies) copies_->join(stream_);
  else if (!dispatch_.routed) know_counts();
  received.rows_now = copies_->rows(slot_);
}

// Rows in the area can be read by peers. With expert_major they would read several for each sum.
bool GpuEngine::lends(const MoeOutputs& outputs) const {
  const std::size_t first = work_.space.x(0), end = work_.space.x(kEpochs);
  const std::size_t from = offset(outputs.y);
  return work_.dims.ranks > 1 && !few_sums() && !work_.dims.expert_major() &&
         number(outputs.y) >= number(work_.own) && from >= first && from % gpu::Lent::kUnit == 0 &&
         from + work_.dims.rows_held * outputs.row_bytes <= end;
}

void GpuEngine::begin_combine(const MoeOutputs& outputs, int slot, bool whole) {
  const cuda::OnDevice on(device_);
  stream_ = static_cast<cudaStream_t>(outputs.stream);
  take(slot);
  combine_ = {.y = static_cast<const byte*>(outputs.y),
              .bias = static_cast<const byte*>(outputs.bias),
              .weights = outputs.weights,
              .out = static_cast<byte*>(outputs.out),
              .bytes = static_cast<std::uint32_t>(outputs.row_bytes),
              .lines = static_cast<std::uint32_t>(gpu::lines_of(outputs.row_bytes)),
              .dtype = outputs.dtype,
              .wide = word_of(number(outputs.y) | number(outputs.bias) | number(outputs.out) |
                              outputs.row_bytes) == 16,
              .push = true,
              .sum = whole,
              .one_chunk = few() || at_once()};
  // a graph is not to hold the counts of this call
  if (many() && !whole && !cuda::is_capturing(stream_)) return return_by_copies();
  combine_.lends = lends(outputs);
  if (few_sums()) check(gpu::low_latency_combine(work_, combine_, blocks_for_few(), stream_));
  else if (work_.dims.ranks > 1) check(gpu::combine(work_, combine_, blocks_for_rows(), stream_));
}

void GpuEngine::end_combine() {
  const cuda::OnDevice on(device_);
  if (combine_.sum && work_.dims.ranks > 1) return;  // the kernel that pushes has summed
  impl_.take_gpu(stream_);
  combine_.push = false;
  combine_.sum = true;
  if (few_sums()) return check(gpu::low_latency_combine(work_, combine_, blocks_for_few(), stream_));
  const int most = work_.dims.ranks == 1 ? blocks(sum_blocks_) : blocks_for_rows();
  check(gpu::combine(work_, combine_, most, stream_));
  if (combine_.returned > 0) copies_->join(stream_);
}

std::unique_ptr<Engine> make_gpu_engine(Communicator::Impl& impl, const Dims& dims, bool host_counts) {
  return std::make_unique<GpuEngine>(impl, dims, host_counts);
}

}  // namespace unisono::moe
