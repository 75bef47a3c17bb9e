// Calls on device memory: they are only enqueued.
#include "cuda/backend.hpp"

#include "core/comparison.hpp"
#include "cuda/layout.hpp"

namespace unisono {

Algorithm cuda::Engine::choose(const Plan& plan, Collective collective, std::size_t bytes, bool symmetric,
                               bool in_place) const {
  const bool told = traits_of(collective).by_parts() || traits_of(collective).two_ended;
  const bool reached = told ? peer_access() : symmetric && reaches(collective, in_place);
  const Algorithm chosen = plan.choose(collective, bytes, reached);
  if ((is_direct(chosen) && !reached) || !carries(collective, chosen, bytes)) return Plan::staged(collective);
  if (chosen != Algorithm::copy_engine || !in_place) return chosen;
  // whose sums pass through the output
  if (collective == Collective::all_reduce) return Algorithm::two_shot_push;
  if (collective == Collective::reduce) return Algorithm::direct;
  return chosen;
}

GpuCommunicator::GpuCommunicator(Bootstrap& bootstrap, const Communicator::Options& options,
                                 const std::vector<int>& numbers)
    : LocalCommunicator(bootstrap, options, numbers),
      engine_(cuda::Engine::make(group(), {.device = options.device.value_or(0),
                                           .max_sms = options.max_sms,
                                           .peer_access = options.peer_access,
                                           .timeout_s = timeout_of(options)})),
      gpu_plan_(size() > cuda::kFewRanks ? Plan::of_many_gpus(size())
                : engine_->nvlink()      ? Plan::of_gpu(engine_->card(), size())
                                         : Plan::of_gpu_over_pcie(size())) {}

void GpuCommunicator::do_run(Request& request) {
  if (request.call->memory == Memory::device) run_on_gpu(request, -1, -1);
  else LocalCommunicator::do_run(request);
}

void GpuCommunicator::do_run_pair(Request& request, int to, int from) {
  if (request.call->memory == Memory::device) run_on_gpu(request, to, from);
  else LocalCommunicator::do_run_pair(request, to, from);
}

Algorithm GpuCommunicator::choose(Collective collective, std::size_t bytes, bool symmetric, Memory memory,
                                  bool in_place) {
  if (memory == Memory::host)
    return LocalCommunicator::choose(collective, bytes, symmetric, memory, in_place);
  if (collective == Collective::all_reduce_rms_norm) return choose_norm(bytes);
  if (collective == Collective::all_to_all_v)
    bytes /= static_cast<std::size_t>(size());  // its messages, if they are of one size
  return engine_->choose(gpu_plan_, collective, bytes, symmetric, in_place);
}

// Without a row in the table, which those of 2 and 4 GPUs have: up to 1 MiB as an all_reduce of as many
// bytes. two_shot: an all_reduce, then the rest.
Algorithm GpuCommunicator::choose_norm(std::size_t bytes) const {
  constexpr std::size_t kMostFused = std::size_t{1} << 20;
  if (size() > cuda::kFewRanks) return Algorithm::two_shot;
  Algorithm chosen = gpu_plan_.listed(Collective::all_reduce_rms_norm, bytes, false);
  if (chosen == Algorithm::automatic)
    chosen =
        bytes > kMostFused ? Algorithm::two_shot : gpu_plan_.choose(Collective::all_reduce, bytes, false);
  return is_packets(chosen) || (is_lines(chosen) && engine_->nvlink()) ? chosen : Algorithm::two_shot;
}

Algorithm GpuCommunicator::choose_wire(std::size_t bytes, Memory memory) {
  const bool lines =
      memory == Memory::device && engine_->carries(Collective::all_reduce, Algorithm::two_shot_ll128, bytes);
  return lines ? Algorithm::two_shot_ll128 : Algorithm::two_shot;
}

int GpuCommunicator::sms(Collective collective, std::size_t bytes, bool symmetric, Algorithm algorithm,
                         bool in_place) {
  const bool reached = symmetric && engine_->reaches(collective, in_place);
  const Shape shape = gpu_plan_.shape(collective, bytes, reached, algorithm);
  return engine_->shape(collective, algorithm, shape, bytes).blocks;
}

void GpuCommunicator::run_on_gpu(Request& request, int to, int from) {
  cuda::Engine& gpu = *engine_;
  gpu.check();
  const bool pair = to >= 0 || from >= 0;
  const bool symmetric = !pair && gpu.symmetric(request);
  const Collective planned = pair ? Collective::send_recv : request.collective;
  const std::size_t bytes = request.bytes();
  Algorithm& algorithm = request.algorithm;
  const bool by_message = traits_of(planned).by_parts() && algorithm == Algorithm::automatic && size() > 1;
  if (algorithm == Algorithm::automatic && !by_message)
    algorithm = gpu.choose(gpu_plan_, planned, bytes, symmetric, request.in_place());
  if (request.call->wire != Wire::exact && request.call->algorithm.empty())
    algorithm = choose_wire(bytes, Memory::device);
  if (check_ && size() > 1) {
    if (pair) compare_pair(*this, packets(), request, to, from);
    else if (traits_of(planned).by_parts()) compare_parts(*this, packets(), request);
    else compare_places(request, symmetric);
  }
  if (bytes == 0) return;
  if (by_message) run_messages_on_gpu(request);
  else enqueue(request, algorithm, symmetric, to, from);
}

// Each by its own size, so that both of its ends do alike: those that go directly last, on every rank.
void GpuCommunicator::run_messages_on_gpu(const Request& request) {
  for (const bool direct : {false, true}) {
    Algorithm algorithm{};
    const auto some = request.with_parts([&](const Args::Part& part) {
      const Algorithm its = planned(request, part);
      if (part.bytes == 0 || is_direct(its) != direct) return Args::Part{};
      algorithm = its;
      return part;
    });
    if (some) enqueue(*some, algorithm, false);
  }
}

Algorithm GpuCommunicator::planned(const Request& request, const Args::Part& part) {
  if (request.call->memory == Memory::host) return LocalCommunicator::planned(request, part);
  return engine_->choose(gpu_plan_, request.collective, part.bytes, false, false);
}

void GpuCommunicator::enqueue(const Request& request, Algorithm algorithm, bool symmetric, int to, int from) {
  cuda::Engine& gpu = *engine_;
  const bool pair = to >= 0 || from >= 0;
  const Collective planned = pair ? Collective::send_recv : request.collective;
  if (size() > cuda::kFewRanks && !cuda::runs_on_many(algorithm))
    throw UsageError(std::string(name_of(algorithm)) + " is for up to " + std::to_string(cuda::kFewRanks) +
                     " GPUs, not " + std::to_string(size()) +
                     ": leave algorithm out, or name one without packets, lines or copy engines.");
  if (is_direct(algorithm) && !gpu.peer_access())
    throw UsageError(
        std::string(name_of(algorithm)) +
        " needs GPUs with peer access, which a pair of this communicator's lacks or an option has "
        "switched off: use another algorithm.");
  if (is_lines(algorithm) && !gpu.nvlink())
    throw UsageError(std::string(name_of(algorithm)) +
                     " needs peer access over NVLink, which this process does not find between all of this "
                     "communicator's GPUs or an option has switched off: use another algorithm.");
  if (is_direct(algorithm) && !symmetric && !pair && !traits_of(planned).by_parts())
    throw UsageError(
        std::string(name_of(algorithm)) +
        " needs registered buffers, or buffers from Communicator::empty, at the same offset on every rank, "
        "out of place in an all_to_all: use them, or another algorithm.");
  const Shape shape = gpu_plan_.shape(planned, request.bytes(), symmetric, algorithm);
  gpu.run(request, algorithm, shape, calls_, to, from);
}

std::shared_ptr<void> GpuCommunicator::do_allocate(std::size_t bytes, Memory memory) {
  if (memory == Memory::host) return LocalCommunicator::do_allocate(bytes, memory);
  if (check_ && size() > 1) compare(*this, group().exchange(Ticket::of(Collective::empty, bytes)));
  return engine_->allocate(bytes);
}

std::shared_ptr<void> GpuCommunicator::do_register(const MemoryRange& range) {
  if (range.memory == Memory::host) return LocalCommunicator::do_register(range);
  begin_registration(range);
  return engine_->register_memory(range);
}

void GpuCommunicator::do_end(Registration::State& one) {
  if (one.memory == Memory::host) return LocalCommunicator::do_end(one);
  one.kept.reset();
  engine_->end_registration([&] { LocalCommunicator::do_end(one); });
}

// On a GPU, one rank's place stands for all, of the buffers that peers reach.
void GpuCommunicator::compare_places(const Request& request, bool symmetric) {
  Ticket mine = Ticket::of(request);
  const auto [in, out] = traits_of(request.collective).stores;
  if (in) mine.in = engine_->place(request.args.in, 0);
  if (out) mine.out = engine_->place(request.args.out, 0);
  mine.in_place = symmetric;
  const auto tickets = group().exchange(mine);
  for (int r = 1; r < size(); ++r) {
    Ticket its = tickets[static_cast<std::size_t>(r)];
    const bool same = its.in_place == tickets[0].in_place &&
                      (!its.in_place || (its.in == tickets[0].in && its.out == tickets[0].out));
    its.algorithm = tickets[0].algorithm;  // other places lead to another
    if (!same && tickets[0].matches(its))
      group().fail(
          FailureKind::mismatch,
          "rank " + std::to_string(number(0)) + " and rank " + std::to_string(number(r)) + " gave " +
              std::string(name_of(request.collective)) +
              " different places of symmetric memory: give the same offset of the same allocation on "
              "every rank, or none.");
  }
  compare(*this, tickets);
}

}  // namespace unisono
