// Memory of the user's that every rank of a communicator knows.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "unisono/types.hpp"
#include "unisono/version.hpp"

namespace unisono {

// The memory that a rank registers.
struct MemoryRange {
  void* data = nullptr;
  std::size_t bytes = 0;
  Memory memory = Memory::host;
  std::shared_ptr<const void> owner{};  // kept until the registration ends
  // Nonempty: why this rank has no memory to register. Every rank then throws UsageError with this text.
  std::string problem{};
};

// A handle of a registration. Copies are of the same registration, which lasts without them.
class Registration {
 public:
  Registration() = default;

  // Ends the registration. Collective: when it returns, no rank reaches the memory any more. Idempotent. If
  // the communicator is closed, it ends the registration on this rank alone.
  // Throws UsageError, and ends nothing, as other calls do. Throws the communicator's failure, and ends the
  // registration on this rank: a peer may still reach the memory until it has left.
  UNISONO_API void close();
  UNISONO_API bool closed() const;
  UNISONO_API std::size_t bytes() const;

  struct State;

 private:
  friend class Communicator;
  explicit Registration(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace unisono
