// How the ranks agree on an allocation: every rank has its part, or none has.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/failure.hpp"

namespace unisono {

// The ranks take the same steps in the same order, and meet after each. Ranks: Group or FabricGroup.
template <class Ranks>
class AllocationAgreement {
 public:
  // `what` is allocated, in words, of `bytes` bytes on each rank.
  AllocationAgreement(Ranks& ranks, std::size_t bytes, std::string_view what)
      : ranks_(ranks), bytes_(bytes), what_(what) {}

  // Takes a step on this rank, except after one that failed. A ResourceError is kept for `meet`.
  template <class Step>
  void attempt(const Step& step) {
    if (problem_) return;
    try {
      step();
    } catch (const ResourceError& error) { problem_ = error.what(); }
  }

  // Returns everyone's `mine`, in rank order, once every rank has taken its steps.
  // Throws ResourceError on every rank if a step has failed on one. Fails the ranks if their sizes differ.
  template <class T>
  std::vector<T> meet(const T& mine) {
    struct Report {
      std::uint64_t asked;
      bool failed;
      T mine;
    };
    const auto reports = ranks_.exchange(Report{bytes_, problem_.has_value(), mine});
    const auto differs = [&](const Report& one) { return one.asked != reports[0].asked; };
    if (const auto one = std::find_if(reports.begin(), reports.end(), differs); one != reports.end())
      ranks_.fail(FailureKind::mismatch, name(0) + " asked for " + std::to_string(reports[0].asked) +
                                             " bytes of " + what_ + ", but " + name(one - reports.begin()) +
                                             " for " + std::to_string(one->asked) +
                                             ": ask for the same on every rank.");
    const auto failed = [](const Report& one) { return one.failed; };
    if (const auto one = std::find_if(reports.begin(), reports.end(), failed); one != reports.end())
      throw ResourceError(
          what_ + " of " + std::to_string(bytes_) + " bytes a rank could not be had: " +
          problem_.value_or(name(one - reports.begin()) + " could not reserve its part: see its error."));
    std::vector<T> all;
    for (const Report& one : reports) all.push_back(one.mine);
    return all;
  }
  void meet() { meet(char{}); }

 private:
  std::string name(std::ptrdiff_t rank) const {
    return "rank " + std::to_string(ranks_.number(static_cast<int>(rank)));
  }

  Ranks& ranks_;
  std::uint64_t bytes_;
  std::string what_;
  std::optional<std::string> problem_;
};

}  // namespace unisono
