// A failure that every rank of a communicator raises: its kind, and one text.
#pragma once

#include <cstdint>
#include <string>

#include "unisono/error.hpp"

namespace unisono {

enum class FailureKind : std::uint32_t { mismatch, timeout, peer_lost, resource, usage };

struct Failure {
  FailureKind kind = FailureKind::peer_lost;
  std::string text;
};

// Throws the error class of that kind.
[[noreturn]] inline void raise(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::mismatch: throw MismatchError(failure.text);
    case FailureKind::timeout: throw TimeoutError(failure.text);
    case FailureKind::resource: throw ResourceError(failure.text);
    case FailureKind::usage: throw UsageError(failure.text);
    default: throw PeerLostError(failure.text);
  }
}

// Returns the failure that an error stands for.
inline Failure failure_of(const Error& error) {
  if (dynamic_cast<const MismatchError*>(&error)) return {FailureKind::mismatch, error.what()};
  if (dynamic_cast<const TimeoutError*>(&error)) return {FailureKind::timeout, error.what()};
  if (dynamic_cast<const ResourceError*>(&error)) return {FailureKind::resource, error.what()};
  return {FailureKind::peer_lost, error.what()};
}

}  // namespace unisono
