#include "unisono/tuning.hpp"

#include <string>

#include "core/backend.hpp"

namespace unisono {
namespace {

Algorithm named(std::string_view algorithm, const std::string& who) {
  if (const auto known = from_name<Algorithm>(algorithm, kAlgorithms)) return *known;
  throw UsageError(who + " the algorithm '" + std::string(algorithm) + "', which does not exist.");
}

}  // namespace

std::string_view Tuning::plan(Collective collective, std::size_t bytes, bool symmetric, Memory memory,
                              bool in_place, Wire wire) const {
  if (wire == Wire::exact)
    return name_of(impl_.choose(planned_as(collective), bytes, symmetric, memory, in_place));
  if (collective != Collective::all_reduce)
    throw UsageError(std::string(name_of(collective)) + " cannot quantise: only all_reduce takes a wire.");
  return name_of(impl_.choose_wire(bytes, memory));
}

int Tuning::sms(Collective collective, std::size_t bytes, bool symmetric, std::string_view algorithm,
                bool in_place) const {
  return impl_.sms(planned_as(collective), bytes, symmetric, named(algorithm, "sms is asked of"), in_place);
}

std::string_view Tuning::kernel_copies() const { return impl_.kernel_copies(); }

void Tuning::set_plan(const std::vector<PlanEntry>& entries, Level level) {
  std::vector<Plan::Entry> read;
  for (const PlanEntry& entry : entries)
    read.push_back({.collective = planned_as(entry.collective),
                    .symmetric = entry.symmetric,
                    .up_to_bytes = entry.up_to_bytes,
                    .algorithm = named(entry.algorithm, "the plan table names"),
                    .shape = {entry.blocks, entry.threads, entry.piece_bytes}});
  impl_.set_plan(read, level);
}

void Tuning::set_shape(int blocks, int threads, std::size_t piece_bytes) {
  const Shape shape{blocks, threads, piece_bytes};
  check_shape(shape, "kernels are asked for");
  impl_.set_shape(shape);
}

void Tuning::reset_shape() { impl_.set_shape(std::nullopt); }

Algorithm Communicator::Impl::choose(Collective collective, std::size_t bytes, bool symmetric, Memory memory,
                                     bool in_place) {
  if (traits_of(collective).two_ended) symmetric = false;  // as the call does
  const Algorithm chosen = plan(memory).choose(collective, bytes, symmetric);
  const bool kept = !in_place || !traits_of(collective).swaps;
  const bool reached = symmetric || memory == Memory::device || reaches_any_memory();
  return is_direct(chosen) && !(reached && kept) ? Plan::staged(collective) : chosen;
}

}  // namespace unisono
