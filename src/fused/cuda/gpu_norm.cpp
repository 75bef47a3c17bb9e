// A call on GPU memory: one kernel that sums and does the rest, or the communicator's all_reduce and a kernel
// for the rest.
#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "base/scales.hpp"
#include "cuda/api.hpp"
#include "cuda/engine.hpp"
#include "fused/cuda/norm.hpp"
#include "fused/engine.hpp"
#include "unisono/error.hpp"

namespace unisono::fused {
namespace {

constexpr std::size_t kLeastPart = 1024;  // bytes of a row, of each block of a cluster
constexpr int kFewestThreads = 256, kMostFinishing = 1024;
constexpr std::size_t kFewRows = 256;  // of a kernel with a block of so many threads for each
constexpr std::size_t kFewestOwned =
    10;  // rows of an owner for which a second step pays (docs/notes/fused.md)
constexpr std::size_t kMostOfBlock = std::size_t{14} << 10;  // bytes of all ranks, where blocks are few
constexpr std::size_t kLeastOfMany = std::size_t{10} << 10;  // bytes of a row, of more rows than blocks

std::uintptr_t number(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

// Returns where the sums of an all_reduce go: an output whose bytes are as many, and that is no input of the
// kernel.
byte* place_of_sums(const Task& task) {
  const NormCall& call = task.call;
  if (call.quant == NormQuant::none && call.out != call.residual) return task.out(0);
  return task.residual_out(0);
}

gpu::Work work_of(const Task& task) {
  const NormCall& call = task.call;
  const std::size_t vector = 8 * size_of(call.dtype), out_vector = call.quant == NormQuant::none ? vector : 8;
  const std::uintptr_t places = number(call.x) | number(call.residual) | number(call.weight) |
                                number(call.bias) | number(call.residual_out) | task.row_bytes;
  return {.residual = task.residual(0),
          .weight = static_cast<const byte*>(call.weight),
          .bias = static_cast<const byte*>(call.bias),
          .residual_out = task.residual_out(0),
          .out = task.out(0),
          .scales = task.scales(0),
          .row_bytes = task.row_bytes,
          .scale_bytes = task.scale_bytes,
          .hidden = static_cast<unsigned>(call.hidden),
          .eps = call.eps,
          .inverse = 1 / call.scale,
          .quant = call.quant,
          .layer = task.kind == host::Norm::layer,
          .whole = places % vector == 0 && number(call.out) % out_vector == 0};
}

// Returns whether a kernel may hold rows in registers, if they are whole: alike on all ranks.
bool short_rows(const NormCall& call, host::Norm kind) {
  return call.hidden > gpu::kNotShort && call.hidden <= gpu::kMostShort && kind == host::Norm::rms;
}

// Returns the bytes of a share of a row in shared memory, if those of `rows` rows fit; else 0.
unsigned held_bytes(const Task& task, unsigned elements, std::size_t rows) {
  const std::size_t bytes = round_up(elements * size_of(task.call.dtype), 32);
  return rows * bytes <= gpu::kMostShared ? static_cast<unsigned>(bytes) : 0;
}

// Enqueues the kernel that follows an all_reduce.
void finish(cuda::Engine& engine, const Task& task, const byte* sums) {
  gpu::Finish finish{work_of(task), sums, held_bytes(task, static_cast<unsigned>(task.call.hidden), 1)};
  finish.work.whole = finish.work.whole && number(sums) % (8 * size_of(task.call.dtype)) == 0;
  const std::size_t hidden = task.call.hidden, rows = task.call.rows;
  const bool few = hidden > gpu::kNotShort && rows <= kFewRows;
  if (rows <= kFewRows && finish.work.whole && short_rows(task.call, task.kind))
    return engine.start(gpu::short_rows_kernel(task.call.dtype, task.call.quant, hidden), &finish,
                        {.blocks = static_cast<int>(rows), .threads = kFewestThreads}, task.call.stream);
  // many threads for the time of a few rows, few for the rate of many
  const int threads = few ? kMostFinishing : kFewestThreads;
  engine.start(gpu::finish_kernel(task.call.dtype, threads, finish.work.whole && finish.row_bytes > 0),
               &finish,
               {.blocks = static_cast<int>(rows), .threads = threads, .shared_bytes = finish.row_bytes},
               task.call.stream);
}

void run_apart(Communicator::Impl& impl, cuda::Engine& engine, const Task& task) {
  const NormCall& call = task.call;
  const byte* sums = task.x(0);
  if (task.ranks > 1) {
    byte* const to = place_of_sums(task);
    const Call sum{.in = call.x,
                   .out = to,
                   .count = call.rows * call.hidden,
                   .dtype = call.dtype,
                   .memory = Memory::device,
                   .stream = call.stream};
    impl.run_within({Collective::all_reduce, sum, impl.rank(), impl.size()});
    sums = to;
  } else {
    engine.take(call.stream);
  }
  finish(engine, task, sums);
}

// Returns how many blocks of a cluster share a row, alike on all ranks: whole words, of which messages are
// made. Clusters that leave a quarter of a GPU free are faster than twice as large ones
// (docs/notes/fused.md).
unsigned cluster_of(const Task& task, std::size_t rows, std::size_t most_blocks) {
  const std::size_t hidden = task.call.hidden;
  const std::size_t most = std::min<std::size_t>(most_blocks, 3 * cuda::kMostBlocks / 4);
  unsigned cluster = task.row_bytes % cuda::kPacketBytes == 0 ? 8 : 1;
  const auto pays = [&] {
    return rows * cluster <= most && task.row_bytes >= cluster * kLeastPart &&
           norm::kPartials - norm::kPartials / cluster < hidden;
  };
  while (cluster > 1 && !pays()) cluster /= 2;
  return cluster;
}

// The shape of one kernel for a call, alike on all ranks.
struct Cut {
  bool lines, two_steps;
  std::size_t steps;      // as SumAndFinish has them
  std::size_t at_a_time;  // rows that a cluster finishes in a step: one of each owner
  unsigned cluster, bits, row_bytes;
  int threads;              // of a block
  std::size_t piece_bytes;  // of a message
  std::size_t teams;        // clusters
  unsigned messages;        // of a share
};

Cut cut_of(const Task& task, const cuda::Engine& engine, Algorithm algorithm) {
  Cut cut{};
  cut.lines = is_lines(algorithm);
  cut.two_steps = form_of(algorithm) == Algorithm::two_shot &&
                  (task.call.algorithm != NormAlgorithm::automatic || task.owned_by(0).count >= kFewestOwned);
  cut.steps = cut.two_steps ? task.owned_by(0).count : task.call.rows;
  cut.at_a_time = cut.two_steps ? static_cast<std::size_t>(task.ranks) : 1;
  const auto most_blocks = static_cast<std::size_t>(engine.most_blocks());
  cut.cluster = cluster_of(task, cut.steps, engine.clusters() ? most_blocks : 0);
  cut.bits = gpu::kRowBits - static_cast<unsigned>(std::countr_zero(cut.cluster));
  const gpu::Share largest(0, cut.bits, static_cast<unsigned>(task.call.hidden));
  cut.row_bytes = held_bytes(task, largest.count, cut.at_a_time);
  const std::size_t of_thread = cut.lines ? cuda::kLineUnit : cuda::kPacketBytes;
  const std::size_t share_bytes = largest.count * size_of(task.call.dtype);
  const std::size_t wanted = round_up((share_bytes + of_thread - 1) / of_thread, 32);
  cut.threads = std::clamp(static_cast<int>(wanted), kFewestThreads, cuda::kMaxThreads);
  cut.piece_bytes = static_cast<std::size_t>(cut.threads) * of_thread;
  cut.teams = std::min(cut.steps, most_blocks / cut.cluster);
  cut.messages = static_cast<unsigned>((share_bytes + cut.piece_bytes - 1) / cut.piece_bytes);
  return cut;
}

// Returns the kernel that holds a call's rows in registers, or null.
const void* kernel_in_registers(const Task& task, const Cut& cut, const gpu::Form& form) {
  if (cut.two_steps || cut.teams != task.call.rows || cut.row_bytes == 0 || !short_rows(task.call, task.kind))
    return nullptr;
  const auto short_kernel = cut.lines ? gpu::short_one_step_by_lines : gpu::short_one_step_by_packets;
  return short_kernel(form, cut.cluster, cut.messages);
}

// Returns whether a kernel that may take all SMs, and does not hold rows in registers, pays where the plan
// names it. One step by lines was planned by one width of rows: with three messages of a row, and with many
// short rows, the calls apart take less (docs/notes/fused.md). What is quantised stays: apart it needs a
// place for the sums, which the call may not have.
bool pays_with_all_sms(const Task& task, const Cut& cut, Algorithm planned) {
  if (planned != Algorithm::one_shot_ll128 || task.call.quant != NormQuant::none) return true;
  return cut.messages <= 2 && (task.call.rows <= cut.teams || task.row_bytes >= kLeastOfMany);
}

// Returns whether one that has few blocks pays: if they have few bytes.
bool pays_with_few_blocks(const Task& task, std::size_t blocks) {
  return task.call.rows * task.row_bytes * static_cast<std::size_t>(task.ranks) / blocks <= kMostOfBlock;
}

// Returns the algorithm that a call takes: packets or lines in one kernel, or any other for the calls apart.
// Alike on all ranks. planned: of an automatic call.
//
// The rest after an all_reduce takes all SMs, where a fused kernel has no more than its ranks may take. It
// pays if it holds rows in registers (docs/notes/fused.md).
Algorithm algorithm_of(Communicator::Impl& impl, const Task& task, Algorithm planned) {
  if (task.ranks == 1 || task.ranks > cuda::kFewRanks || !impl.machine()) return Algorithm::automatic;
  switch (task.call.algorithm) {
    case NormAlgorithm::automatic: break;
    case NormAlgorithm::one_shot: return Algorithm::one_shot_packets;
    case NormAlgorithm::one_shot_ll128: return Algorithm::one_shot_ll128;
    case NormAlgorithm::two_shot: return Algorithm::two_shot_packets;
    case NormAlgorithm::two_shot_ll128: return Algorithm::two_shot_ll128;
    case NormAlgorithm::apart: return Algorithm::automatic;
  }
  const cuda::Engine& engine = *impl.gpu();
  const bool fused = is_packets(planned) || is_lines(planned);
  const bool all_sms = engine.most_blocks() >= cuda::kMostBlocks;
  if (!fused && (all_sms || !engine.nvlink())) return planned;
  const Algorithm in_one = fused ? planned : Algorithm::one_shot_ll128;
  const Cut cut = cut_of(task, engine, in_one);
  if (kernel_in_registers(task, cut, {cut.lines, true, task.ranks, task.call.dtype})) return in_one;
  const bool pays = all_sms
                        ? pays_with_all_sms(task, cut, planned)
                        : fused && pays_with_few_blocks(task, static_cast<std::size_t>(engine.most_blocks()));
  return pays ? in_one : Algorithm::automatic;
}

bool runs_apart(Algorithm algorithm) { return !is_packets(algorithm) && !is_lines(algorithm); }

void run_fused(Communicator::Impl& impl, cuda::Engine& engine, const Task& task, Algorithm algorithm) {
  const NormCall& call = task.call;
  engine.take(call.stream);
  const Cut cut = cut_of(task, engine, algorithm);
  gpu::SumAndFinish of{.x = engine.exchange_of(Collective::all_reduce_rms_norm, cut.lines, impl.calls()),
                       .work = work_of(task),
                       .rows = task.x(0),
                       .count = call.rows,
                       .steps = static_cast<unsigned>(cut.steps),
                       .cluster = cut.cluster,
                       .bits = cut.bits,
                       .row_bytes = cut.row_bytes};
  for (int p = 0; p < task.ranks - 1; ++p) of.x.gives.add(p, task.rank);
  if (cut.two_steps) of.x.passes = of.x.gives;
  of.x.piece_bytes = static_cast<unsigned>(cut.piece_bytes);
  const bool whole = (number(call.x) | number(call.residual) | number(call.residual_out) | task.row_bytes) %
                         cuda::kPacketBytes ==
                     0;
  const gpu::Form form{cut.lines, whole, task.ranks, call.dtype};
  const void* kernel = of.work.whole ? kernel_in_registers(task, cut, form) : nullptr;
  if (kernel == nullptr) kernel = (cut.two_steps ? gpu::two_steps_kernel : gpu::one_step_kernel)(form);
  engine.start(kernel, &of,
               {.blocks = static_cast<int>(cut.teams * cut.cluster),
                .threads = cut.threads,
                .cluster = cut.cluster,
                .shared_bytes = cut.at_a_time * of.row_bytes},
               call.stream);
}

}  // namespace

void check_for_gpu(Communicator::Impl& impl, const Task& task) {
  const NormCall& call = task.call;
  if (call.sharded)
    throw UsageError("a sharded residual is for arrays on CPUs: give all of it on every rank.");
  if (!impl.gpu())
    throw UsageError(
        "a norm of GPU memory needs a communicator with a GPU: make it with device=, on every rank.");
  if (call.rows > static_cast<std::size_t>(std::numeric_limits<int>::max()) || task.row_bytes > std::size_t{1}
                                                                                                    << 31)
    throw UsageError(std::to_string(call.rows) + " rows of " + std::to_string(call.hidden) +
                     " are more than a GPU's kernel takes: split the call.");
  const bool asked = call.algorithm != NormAlgorithm::automatic && call.algorithm != NormAlgorithm::apart;
  if (asked && task.ranks > cuda::kFewRanks)
    throw UsageError(std::string(name_of(call.algorithm)) + " is for up to " +
                     std::to_string(cuda::kFewRanks) + " GPUs: leave the algorithm out.");
  if ((call.algorithm == NormAlgorithm::one_shot_ll128 || call.algorithm == NormAlgorithm::two_shot_ll128) &&
      !impl.gpu()->nvlink())
    throw UsageError(std::string(name_of(call.algorithm)) +
                     " needs peer access over NVLink: use one_shot or two_shot, or leave the algorithm out.");
  if (call.quant != NormQuant::none && call.residual_out == call.residual && call.rows > 0 &&
      task.ranks > 1 && runs_apart(algorithm_of(impl, task, by_plan(impl, task))))
    throw UsageError(
        "residual_out is residual, which a norm with quant apart from the all_reduce cannot take: give it "
        "memory of its own.");
}

void run_on_gpu(Communicator::Impl& impl, const Task& task, Algorithm planned) {
  cuda::Engine& engine = *impl.gpu();
  const cuda::OnDevice on(engine.device());
  const Algorithm algorithm = algorithm_of(impl, task, planned);
  if (runs_apart(algorithm)) run_apart(impl, engine, task);
  else run_fused(impl, engine, task, algorithm);
}

void load_for_gpu(Communicator::Impl& impl) {
  const cuda::OnDevice on(impl.gpu()->device());
  gpu::load(impl.size());
}

}  // namespace unisono::fused
