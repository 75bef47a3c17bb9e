// A failure that every rank of a communicator raises: its kind, and one text.
#pragma once

#include <algorithm>
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

// A failure as ranks tell each other of it: its kind, as a digit, and its text.
inline std::string told(const Failure& failure) {
  return static_cast<char>('0' + static_cast<int>(failure.kind)) + failure.text;
}
// Returns what was told. Nothing, or what is no kind, becomes one of the kinds.
inline Failure failure_told(const std::string& text) {
  const int kind = std::clamp(text.empty() ? 0 : text.front() - '0', 0, static_cast<int>(FailureKind::usage));
  return {static_cast<FailureKind>(kind), text.substr(std::min<std::size_t>(1, text.size()))};
}

}  // namespace unisono
