// Registrations as every backend has them: what is registered, and how it ends.
#include "unisono/registration.hpp"

#include <algorithm>
#include <utility>

#include "core/backend.hpp"

namespace unisono {

Registration::Registration(std::shared_ptr<State> state) : state_(std::move(state)) {}

void Registration::close() {
  if (state_ && state_->of) state_->of->end(*state_);
}

bool Registration::closed() const { return !state_ || !state_->of || state_->of->closed(); }

std::size_t Registration::bytes() const { return state_ ? state_->bytes : 0; }

Communicator::Impl::~Impl() {
  while (!registrations_.empty()) drop(*registrations_.back());
}

// Returns why a rank cannot register the memory, as far as every backend knows; empty: it can.
std::string Communicator::Impl::problem_of(const MemoryRange& range) const {
  if (!range.problem.empty()) return range.problem;
  if (range.memory == Memory::device && !device()) return kNoGpu;
  if (range.bytes == 0) return {};
  const auto* const begin = static_cast<const byte*>(range.data);
  if (!begin) return "its address is null: give the address of the memory.";
  for (const auto& one : registrations_)
    if (begin < one->begin + one->bytes && one->begin < begin + range.bytes)
      return "it overlaps memory that is registered: register the whole of it once, views within it are "
             "known "
             "then, or close that registration first.";
  return {};
}

std::shared_ptr<Registration::State> Communicator::Impl::register_memory(MemoryRange range) {
  return turn(Collective::register_memory, [&] {
    range.problem = problem_of(range);
    auto one = std::make_shared<Registration::State>();
    one->begin = static_cast<const byte*>(range.data);
    one->bytes = range.bytes;
    one->memory = range.memory;
    one->kept = do_register(range);
    one->number = ++registered_;
    registrations_.push_back(one);
    one->of = this;
    return one;
  });
}

void Communicator::Impl::end(Registration::State& one) {
  if (closed()) {
    if (inherited()) return drop(one);
    check_outside(name_of(Collective::end_registration));
    const Turns::Turn turn(turns_, turns_.come());  // a call of another thread may still use the memory
    return drop(one);
  }
  try {
    turn(Collective::end_registration, [&] { do_end(one); });
  } catch (const UsageError&) { throw; } catch (...) {
    drop(one);
    throw;
  }
  drop(one);
}

// Ends a registration on this rank.
void Communicator::Impl::drop(Registration::State& one) noexcept {
  one.of = nullptr;
  one.kept.reset();
  std::erase_if(registrations_, [&](const auto& other) { return other.get() == &one; });
}

}  // namespace unisono
