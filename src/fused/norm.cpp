#include <vector>

#include "core/comparison.hpp"
#include "fused/engine.hpp"
#include "host/backend.hpp"

namespace unisono {
namespace fused {

Algorithm by_plan(Communicator::Impl& impl, const Task& task) {
  return impl.choose(Collective::all_reduce_rms_norm, task.call.rows * task.row_bytes, false,
                     task.call.memory, false);
}

namespace {

// Fails the communicator if the ranks' calls differ.
void compare(Communicator::Impl& impl, const Asked& mine) {
  std::vector<Asked> all(static_cast<std::size_t>(impl.size()), mine);
  const Call call{.in = &mine, .out = all.data(), .count = sizeof mine, .dtype = DType::u8};
  impl.run_within({Collective::all_gather, call, impl.rank(), impl.size()});
  for (std::size_t r = 1; r < all.size(); ++r)
    if (!(all[r] == all[0]))
      mismatch(impl, 0, all[0], static_cast<int>(r), all[r], "make the same call on every rank.");
}

void run_alone(const Task& task) {
  Tail tail(task);
  for (std::size_t row = 0; row < task.call.rows; ++row) tail.follow(row, task.x(row));
}

// Returns whether nobody reads normalised rows before the caller does: those of a sharded residual travel,
// and quantised ones are codes.
bool may_stream(const NormCall& call) { return !call.sharded && call.quant == NormQuant::none; }

void run(Communicator::Impl& impl, host::Norm kind, const NormCall& call) {
  Task task(kind, call, impl.rank(), impl.size());
  const bool on_gpu = call.memory == Memory::device;
  if (on_gpu) check_for_gpu(impl, task);
  LocalCommunicator* const machine = impl.machine();
  task.streams = machine && may_stream(call) && call.rows * task.out_bytes >= machine->group().stream_bytes();
  const bool planned = call.algorithm == NormAlgorithm::automatic,
             apart = call.algorithm == NormAlgorithm::apart;
  if (!machine && !planned && !apart)
    throw UsageError(std::string(name_of(call.algorithm)) +
                     " is for ranks of one machine: leave the algorithm out.");
  if (!on_gpu &&
      (call.algorithm == NormAlgorithm::one_shot_ll128 || call.algorithm == NormAlgorithm::two_shot_ll128))
    throw UsageError(std::string(name_of(call.algorithm)) +
                     " is for arrays on GPUs: use one_shot or two_shot, or leave the algorithm out.");
  impl.turn(task.name(), [&] {
    if (impl.check() && task.ranks > 1) compare(impl, Asked(task));
    if (call.rows == 0) return;
    if (on_gpu)
      return run_on_gpu(impl, task, machine && planned ? by_plan(impl, task) : Algorithm::automatic);
    if (task.ranks == 1) return run_alone(task);
    if (machine && !apart) return run_on_machine(*machine, task);
    run_composed(impl, task);
  });
}

}  // namespace
}  // namespace fused

// Reaches a communicator's backend.
class FusedNorm {
 public:
  static Communicator::Impl& impl(Communicator& communicator) { return *communicator.impl_; }
};

void all_reduce_rms_norm(Communicator& communicator, const NormCall& call) {
  fused::run(FusedNorm::impl(communicator), host::Norm::rms, call);
}
void all_reduce_layer_norm(Communicator& communicator, const NormCall& call) {
  fused::run(FusedNorm::impl(communicator), host::Norm::layer, call);
}

}  // namespace unisono
