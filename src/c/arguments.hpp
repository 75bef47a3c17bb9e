// Arguments and results of the C interface: handles, pointers, structs, numbers and a status.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "unisono/communicator.hpp"
#include "unisono/unisono.h"

struct unisono_comm {
  unisono::Communicator communicator;
};

namespace unisono::c {

// Makes the exception that is being handled this thread's last error. Returns its status.
int failed() noexcept;

// Returns the status of `body`. No exception leaves it.
template <class Body>
int guarded(const Body& body) noexcept {
  try {
    body();
    return UNISONO_OK;
  } catch (...) { return failed(); }
}

// Checks that every call makes throw in functions of their own: one that writes an error's text itself is not
// compiled into its caller.
[[noreturn]] void refuse_null(const char* name);
[[noreturn]] void refuse_number(std::int32_t value, int values, const char* name, const char* type);

template <class T>
T& given(T* pointer, const char* name) {
  if (!pointer) refuse_null(name);
  return *pointer;
}

// Returns a struct of a caller whose header has another version of it.
template <class T>
T read_other(const T* from, const char* name, const char* type, std::size_t least) {
  constexpr std::size_t kMost = 4096;  // bytes; more is no struct of a later version
  const std::size_t size = from->size;
  if (size < least || size > kMost)
    throw UsageError(std::string(name) + "->size is " + std::to_string(size) + ": set it to sizeof(" + type +
                     ").");
  const char* const bytes = reinterpret_cast<const char*>(from);
  if (std::any_of(bytes + std::min(size, sizeof(T)), bytes + size, [](char byte) { return byte != 0; }))
    throw UsageError(std::string(name) + " has fields that this library does not know: load the version of " +
                     "Unisono that the program was compiled for, or leave them 0.");
  T known{};
  std::memcpy(&known, from, std::min(size, sizeof(T)));
  return known;
}

// Returns a struct of the caller's, or a copy in `room`, where fields that the caller's header lacks are 0.
// type: its name. least: the bytes of its first version.
template <class T>
const T& read(const T* from, T& room, const char* name, const char* type, std::size_t least = sizeof(T)) {
  if (given(from, name).size == sizeof(T)) return *from;
  return room = read_other(from, name, type, least);
}

template <class E>
E number(std::int32_t value, int values, const char* name, const char* type) {
  if (value < 0 || value >= values) refuse_number(value, values, name, type);
  return static_cast<E>(value);
}

inline Memory memory_of(std::int32_t value, const char* name = "memory") {
  return number<Memory>(value, UNISONO_DEVICE + 1, name, "unisono_memory");
}

inline void check_reserved(std::int32_t value, const char* name) {
  if (value != 0)
    throw UsageError(std::string(name) + "=" + std::to_string(value) + " means nothing yet: set it to 0.");
}

}  // namespace unisono::c
