// Turns a call into work that is enqueued on its stream.
#include <algorithm>

#include "base/wire.hpp"
#include "cuda/gpu_engine.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {

bool GpuEngine::symmetric(const Request& request) const {
  if (!reaches(request.collective, request.in_place())) return false;
  const Args& a = request.args;
  const auto [in, out] = traits_of(request.collective).stores;
  auto lies = [&](const byte* at) { return at && place(at, a.bytes).allocation != Place::kNone; };
  return (!in || lies(a.in)) && (!out || lies(a.out));
}

std::size_t GpuEngine::unit_of(Collective collective, Algorithm algorithm, std::size_t bytes) const {
  const CollectiveTraits& call = traits_of(collective);
  const AlgorithmTraits& how = traits_of(algorithm);
  if (call.by_parts())  // no rank knows the longest part of all ranks
    return how.pieces == Pieces::chunks ? layout_.chunk_bytes * kMostBlocks : std::size_t{1} << 20;
  if (call.two_ended) return bytes;
  if (!call.by_blocks() && !how.shards) return bytes;
  return bytes / static_cast<std::size_t>(owners(collective, algorithm));
}

int GpuEngine::owners(Collective collective, Algorithm algorithm) const {
  const bool all = !traits_of(collective).rooted() || traits_of(collective).by_blocks() ||
                   algorithm == Algorithm::scatter_all_gather;
  return all ? group_.size() : std::max(group_.size() - 1, 1);
}

Shape GpuEngine::cut(Algorithm algorithm, const Shape& asked, std::size_t unit, std::size_t line_unit) const {
  struct Kind {
    std::size_t of_thread;  // bytes that a thread moves at once
    std::size_t align;      // of a piece's size; pieces begin at multiples of kAlign
    std::size_t most;       // of a piece
    std::size_t share;      // of a block
    int least_threads, most_blocks;
  };
  const bool packets = is_packets(algorithm), lines = is_lines(algorithm), exchange = packets || lines;
  const std::size_t eight = 8 * kLineUnits * line_unit;
  Kind kind{.of_thread = 16,
            .align = 1024,
            .most = layout_.chunk_bytes,
            .share = 8192,
            .least_threads = 128,
            .most_blocks = blocks_};
  if (packets)
    kind = {.of_thread = kPacketBytes,
            .align = kAlign,
            .most = kPackets * kPacketBytes,
            .share = 1024,
            .least_threads = 32,
            .most_blocks = blocks_};
  // About 64 blocks, unless their pieces would be too small to pay for a start, or too large for a ring.
  if (lines)
    kind = {.of_thread = line_unit,
            .align = eight,
            .most = kPackets * line_unit,
            .share = std::max(round_up(unit / 64, eight), 2 * eight),
            .least_threads = 32,
            .most_blocks = line_unit == kLineUnit ? std::min(blocks_, kMostLineBlocks) : blocks_};
  if (exchange && asked.threads) {  // each thread has one unit of a piece
    const std::size_t fits = kind.of_thread * static_cast<std::size_t>(asked.threads);
    kind.most = std::clamp(fits / kind.align * kind.align, kind.align, kind.most);
  }
  const std::size_t share = std::min(asked.piece_bytes ? asked.piece_bytes : kind.share, kind.most);
  const auto limit =
      static_cast<std::size_t>(asked.blocks ? std::min(asked.blocks, blocks_) : kind.most_blocks);
  const std::size_t blocks = std::clamp<std::size_t>((unit + share - 1) / share, 1, limit);
  const std::size_t piece = asked.piece_bytes ? asked.piece_bytes : (unit + blocks - 1) / blocks;
  Shape shape;
  shape.blocks = static_cast<int>(blocks);
  shape.piece_bytes = std::clamp(round_up(piece, kind.align), kind.align, kind.most);
  const std::size_t wanted = round_up((shape.piece_bytes + kind.of_thread - 1) / kind.of_thread, 32);
  shape.threads = asked.threads && !exchange
                      ? asked.threads
                      : std::clamp(static_cast<int>(wanted), kind.least_threads, kMaxThreads);
  return shape;
}

void GpuEngine::meet(const Launch& given, cudaStream_t stream) const {
  Launch launch = given;
  this->launch(kernel(Collective::barrier, Algorithm::automatic, DType::u8, Op::sum, false), launch,
               {1, 32 * kFewRanks, kAlign}, stream);
}

void GpuEngine::order(cudaStream_t earlier, cudaStream_t later, cudaEvent_t event) const {
  check(cudaEventRecord(event, earlier), "ordering two streams");
  check(cudaStreamWaitEvent(later, event, 0), "ordering two streams");
}

namespace {

// Returns the number of the capture that a stream takes part in; 0: calls on it are eager.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &number) != cudaSuccess)
    cudaGetLastError();  // the legacy stream, while another is captured
  return status == cudaStreamCaptureStatusNone ? 0 : number;
}

}  // namespace

// Orders the call behind the last one, if both are eager or in the same capture. Other pairs cannot wait for
// each other: a captured call runs when its graph is launched.
void GpuEngine::take_turn(cudaStream_t stream) {
  const unsigned long long capture = capture_of(stream);
  Last& last = capture ? captured_ : eager_;
  if (stream != last.stream && capture == last.capture && capture == capture_of(last.stream))
    order(last.stream, stream, turn_);
  last = {stream, capture};
}

int GpuEngine::take(void* stream) {
  check();
  take_turn(static_cast<cudaStream_t>(stream));
  return blocks_;
}

void GpuEngine::start(const void* kernel, void* parameter, const Grid& grid, void* stream) const {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t how{};
  how.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  how.blockDim = dim3(static_cast<unsigned>(grid.threads));
  how.dynamicSmemBytes = grid.shared_bytes;
  how.stream = static_cast<cudaStream_t>(stream);
  how.attrs = attributes;
  if (early_) {
    cudaLaunchAttribute& early = attributes[how.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[how.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = grid.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  void* parameters[] = {parameter};
  check(cudaLaunchKernelExC(&how, kernel, parameters), "starting a kernel");
}

template <int kMost>
ContextOf<kMost> GpuEngine::context() const {
  ContextOf<kMost> all;
  if constexpr (kMost == kFewRanks) {
    all = base_;
  } else {
    all.rank = base_.rank;
    all.layout = base_.layout;
    std::copy(bases_.begin(), bases_.end(), all.bases);
    all.failure = base_.failure;
    all.counts_up = base_.counts_up;
  }
  all.timeout_ns = timeout_ns();
  return all;
}

template <int kMost>
LaunchOf<kMost> GpuEngine::launch_of(const Request& request, std::uint64_t call, int to, int from) const {
  LaunchOf<kMost> launch;
  launch.context = context<kMost>();
  launch.context.collective = request.collective;
  launch.context.call = call;
  launch.dtype = request.call->dtype;
  launch.op = request.call->op;
  launch.args = request.args;
  launch.to = std::max(to, 0);
  launch.from = std::max(from, 0);
  launch.sent = to < 0 ? 0 : request.args.bytes;
  launch.received = from < 0 ? 0 : request.args.bytes;
  launch.by_parts = traits_of(request.collective).by_parts();
  if (launch.by_parts) {
    std::copy_n(request.sends.begin(), group_.size(), launch.sends);
    std::copy_n(request.receives.begin(), group_.size(), launch.receives);
  }
  return launch;
}

template <int kMost>
void GpuEngine::reach_peers(LaunchOf<kMost>& launch, const Request& request, int from) const {
  const Args& args = request.args;
  const int n = group_.size(), me = group_.rank();
  if (launch.by_parts || traits_of(request.collective).two_ended) {
    // in place, arriving data would overwrite data that has yet to leave; a batch's buffers are apart
    const bool apart = request.collective == Collective::batch_send_recv || !request.in_place();
    if (apart && from >= 0) launch.mine = seen_by(from, args.out, args.bytes);
    for (int p = 0; apart && p < n; ++p)
      if (const Args::Part& part = launch.receives[p]; p != me && part.bytes > 0)
        launch.outputs[p] = seen_by(p, part.at, part.bytes);
    return;
  }
  const std::scoped_lock lock(symmetric_->mutex);
  auto reach = [&](const byte* at, auto& of_ranks) {
    const Found mine = find(at, 0);
    for (int r = 0; mine.allocation && r < n; ++r)
      of_ranks[r] = mine.allocation->parts[static_cast<std::size_t>(r)]->data() + mine.place.offset;
  };
  reach(args.in, launch.inputs);
  reach(args.out, launch.outputs);
}

void GpuEngine::run_by_engine(const Launch& launch, const Request& request, const Shape& asked,
                              std::uint64_t call, cudaStream_t stream) {
  if (!traits_of(request.collective).combines) return copy_by_engine(launch, request.collective, stream);
  if (request.in_place())
    throw UsageError(
        "copy engines need an output apart from the input: leave algorithm out, or give another.");
  if (!carries(request.collective, Algorithm::copy_engine, request.bytes()))
    throw UsageError("a reduce by copy engines is for two ranks: leave algorithm out, or give another.");
  if (request.collective == Collective::reduce) return reduce_by_engine(launch, asked, stream);
  // copy engines move whole shards; packets carry the rest
  const std::size_t shards = kAlign * static_cast<std::size_t>(group_.size());
  const std::size_t even = request.args.bytes - request.args.bytes % shards;
  if (even > 0) all_reduce_by_engine(launch, even, asked, stream);
  if (even == request.args.bytes) return;
  Request rest = request;
  rest.args.in += even;
  rest.args.out += even;
  rest.args.bytes -= even;
  exchange(rest, Algorithm::one_shot_packets, {}, call, -1, -1, stream);
}

template <int kMost>
void GpuEngine::run_program(LaunchOf<kMost>& launch, const Request& request, Algorithm algorithm,
                            const Shape& asked, cudaStream_t stream) const {
  constexpr bool kMany = kMost > kFewRanks;
  if (const Wire as = request.call->wire; as != Wire::exact) {
    const std::size_t shard = wire::bytes_of(request.call->count) / static_cast<std::size_t>(group_.size());
    return this->launch(quantised_kernel(launch.dtype, as, kMany), launch, cut(algorithm, asked, shard),
                        stream);
  }
  const void* const found = kernel(request.collective, algorithm, launch.dtype, launch.op, kMany);
  if (!found)
    throw UsageError(std::string(name_of(request.collective)) + " has no kernel for " +
                     std::string(name_of(algorithm)) + ": use another algorithm.");
  const std::size_t unit = unit_of(request.collective, algorithm, request.args.bytes);
  this->launch(found, launch, cut(algorithm, asked, unit), stream);
}

void GpuEngine::run(const Request& request, Algorithm algorithm, const Shape& planned, std::uint64_t call,
                    int to, int from) {
  const OnDevice on(device_);
  auto* const stream = static_cast<cudaStream_t>(request.call->stream);
  const int me = group_.rank();
  if (group_.size() == 1 || (to == me && from == me))
    return copy(request.args.out, request.args.in, request.args.bytes, stream);
  take_turn(stream);
  const bool exact = request.call->wire == Wire::exact;
  const Shape asked = asked_.value_or(exact ? planned : Shape{});  // plans have the shapes of exact calls
  if (traits_of(algorithm).pieces != Pieces::chunks)
    return exchange(request, algorithm, asked, call, to, from, stream);
  if (many()) {
    auto launch = launch_of<kMaxRanks>(request, call, to, from);
    if (is_direct(algorithm)) reach_peers(launch, request, from);
    return run_program(launch, request, algorithm, asked, stream);
  }
  auto launch = launch_of<kFewRanks>(request, call, to, from);
  if (is_direct(algorithm)) reach_peers(launch, request, from);
  if (algorithm == Algorithm::copy_engine) return run_by_engine(launch, request, asked, call, stream);
  run_program(launch, request, algorithm, asked, stream);
}

}  // namespace unisono::cuda
