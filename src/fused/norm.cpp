#include <vector>

#include "fused/engine.hpp"

namespace unisono {
namespace fused {
namespace {

// Fails the communicator if the ranks' calls differ.
void compare(Communicator::Impl& impl, const Asked& mine) {
  std::vector<Asked> all(static_cast<std::size_t>(impl.size()), mine);
  const Call call{.in = &mine, .out = all.data(), .count = sizeof mine, .dtype = DType::u8};
  impl.run_within({Collective::all_gather, call, impl.rank(), impl.size()});
  for (std::size_t r = 1; r < all.size(); ++r)
    if (!(all[r] == all[0]))
      impl.disagree("rank " + std::to_string(impl.number(0)) + " called " + all[0].text() + ", but rank " +
                    std::to_string(impl.number(static_cast<int>(r))) + " called " + all[r].text() +
                    ": make the same call on every rank.");
}

void run_alone(const Task& task) {
  Tail tail(task);
  for (std::size_t row = 0; row < task.call.rows; ++row) tail.follow(row, task.x(row));
}

void run(Communicator::Impl& impl, host::Norm kind, const NormCall& call) {
  const Task task(kind, call, impl.rank(), impl.size());
  const bool on_gpu = call.memory == Memory::device;
  if (on_gpu) check_for_gpu(task);
  Group* const group = impl.machine();
  if (!group && (call.algorithm == NormAlgorithm::one_shot || call.algorithm == NormAlgorithm::two_shot))
    throw UsageError("one_shot and two_shot are for ranks of one machine: leave the algorithm out.");
  impl.turn(task.name(), [&] {
    if (impl.check() && task.ranks > 1) compare(impl, Asked(task));
    if (call.rows == 0) return;
    if (on_gpu) return run_on_gpu(impl, task);
    if (task.ranks == 1) return run_alone(task);
    if (group && call.algorithm != NormAlgorithm::apart && run_on_machine(*group, task)) return;
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
