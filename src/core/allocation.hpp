// How the ranks agree on memory of which each has a part: every rank has its part, or none has.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/failure.hpp"
#include "base/text.hpp"
#include "unisono/registration.hpp"

namespace unisono {

// An allocation or registration that the ranks have agreed to refuse: no rank has the memory, nothing is
// lost, and every rank has the text.
class Refused : public ResourceError {
  using ResourceError::ResourceError;
};
class RefusedUse : public UsageError {
  using UsageError::UsageError;
};

enum class Agreed : std::uint8_t {
  allocation,    // ranks that ask for different sizes fail
  registration,  // of the user's memory: sizes that differ are refused
};

// The ranks take the same steps in the same order, and meet after each. Ranks: Group, FabricGroup, or the
// ranks of several nodes.
template <class Ranks>
class AllocationAgreement {
 public:
  // bytes: of each rank's part. what: the memory that is allocated, in words.
  AllocationAgreement(Ranks& ranks, std::size_t bytes, std::string_view what,
                      Agreed kind = Agreed::allocation)
      : ranks_(ranks), bytes_(bytes), kind_(kind), what_(what) {}

  // Takes a step on this rank, except after one that failed. Keeps its ResourceError or UsageError for
  // `meet`.
  template <class Step>
  void attempt(const Step& step) {
    if (problem_) return;
    try {
      step();
    } catch (const Refused& error) {
      problem_.emplace(error.what(), false, true);
    } catch (const RefusedUse& error) {
      problem_.emplace(error.what(), true, true);
    } catch (const ResourceError& error) {
      problem_.emplace(error.what(), false, false);
    } catch (const UsageError& error) { problem_.emplace(error.what(), true, false); }
  }

  // Returns everyone's `mine`, in rank order, once every rank has taken its steps.
  // Throws Refused or RefusedUse on every rank if a step has failed on one, or if the sizes of a registration
  // differ. Fails the ranks if those of an allocation differ, or if some allocate and some register.
  template <class T>
  std::vector<T> meet(const T& mine) {
    struct Report {
      std::uint64_t asked;
      Agreed kind;
      bool failed;
      T mine;
    };
    const auto reports = ranks_.exchange(Report{bytes_, kind_, problem_.has_value(), mine});
    const auto first = [&](const auto& which) {
      return std::find_if(reports.begin(), reports.end(), which) - reports.begin();
    };
    const auto all = static_cast<std::ptrdiff_t>(reports.size());
    if (const auto r = first([&](const Report& one) { return one.kind != reports[0].kind; }); r < all)
      ranks_.fail(FailureKind::mismatch, name(0) + " and " + name(r) +
                                             " do not both allocate, or both register, memory: make the "
                                             "same calls on every rank.");
    const auto failed = first([](const Report& one) { return one.failed; });
    const auto differs = first([&](const Report& one) { return one.asked != reports[0].asked; });
    if (differs < all && (kind_ == Agreed::allocation || failed == all))
      refuse_sizes(reports[0].asked, differs, reports[static_cast<std::size_t>(differs)].asked);
    if (failed < all) refuse(failed);
    std::vector<T> everyones;
    for (const Report& one : reports) everyones.push_back(one.mine);
    return everyones;
  }
  void meet() { meet(char{}); }

 private:
  // Why a step has failed. usage: it was a UsageError. complete: a sentence of an inner agreement.
  struct Problem {
    Problem() = default;
    Problem(std::string_view why, bool use, bool whole) : usage(use), complete(whole) {
      const std::string_view said = fitting(why, sizeof text - 1);
      std::memcpy(text, said.data(), said.size());
    }
    bool usage = false, complete = false;
    char text[600] = {};
  };

  std::string name(std::ptrdiff_t rank) const {
    return "rank " + std::to_string(ranks_.number(static_cast<int>(rank)));
  }

  [[noreturn]] void refuse_sizes(std::uint64_t of_first, std::ptrdiff_t rank, std::uint64_t its) {
    if (kind_ == Agreed::registration)
      throw RefusedUse(name(0) + " registers " + std::to_string(of_first) + " bytes, but " + name(rank) +
                       " " + std::to_string(its) + ": register as many on every rank.");
    ranks_.fail(FailureKind::mismatch, name(0) + " asked for " + std::to_string(of_first) + " bytes of " +
                                           what_ + ", but " + name(rank) + " for " + std::to_string(its) +
                                           ": ask for the same on every rank.");
  }

  // Throws what has failed on this rank, else on rank `first`.
  [[noreturn]] void refuse(std::ptrdiff_t first) {
    const auto everyones = ranks_.exchange(problem_.value_or(Problem{}));
    const std::ptrdiff_t rank = problem_ ? ranks_.rank() : first;
    const Problem& one = everyones[static_cast<std::size_t>(rank)];
    std::string text(one.text, ::strnlen(one.text, sizeof one.text));
    if (!one.complete && kind_ == Agreed::registration)
      text = name(rank) + " cannot register its memory: " + text;
    else if (!one.complete)
      text = what_ + " of " + std::to_string(bytes_) + " bytes a rank could not be had: " + name(rank) +
             " could not reserve its part: " + text;
    if (one.usage) throw RefusedUse(text);
    throw Refused(text);
  }

  Ranks& ranks_;
  std::uint64_t bytes_;
  Agreed kind_;
  std::string what_;
  std::optional<Problem> problem_;
};

// Begins a registration: agrees on what no backend needs to look at the memory for.
template <class Ranks>
AllocationAgreement<Ranks> agree_to_register(Ranks& ranks, const MemoryRange& range) {
  AllocationAgreement<Ranks> agreement(ranks, range.bytes, "", Agreed::registration);
  agreement.attempt([&] {
    if (!range.problem.empty()) throw UsageError(range.problem);
  });
  for (const Memory one : agreement.meet(range.memory))
    if (one != range.memory)
      throw RefusedUse(
          "some ranks register memory of the host, others of a GPU: register the same kind on every rank.");
  return agreement;
}

}  // namespace unisono
