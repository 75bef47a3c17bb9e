// The memory of a call across nodes: its scratch, copies and sums.
#pragma once

#include <cstddef>
#include <span>

#include "base/bytes.hpp"
#include "unisono/types.hpp"

namespace unisono::nodes {

// The purposes of scratch memory. Each purpose and slot has memory of its own.
enum class Scratch : int {
  everyones,  // a piece of every rank, in rank order
  packed,     // pieces for one node or peer, one after the other
  landed,     // pieces that have come, one after the other
  in_place,   // a copy of an input that the output overwrites
  padded,     // an input with room up to equal shards
  whole,      // all shards, longer than the output
  shard,      // this rank's sums
  incoming,   // partial sums from the node before
  partial,    // partial sums for the node behind
  final,      // sums that are complete
  coded,      // a quantised input
  token,      // one byte of a barrier
};
inline constexpr int kScratches = 12;

// A sum of elements in rank order (host::Resume): of `sources` after `prior`, which is in wide elements, or
// null. ranks: 0 leaves the result wide; otherwise the result is finished for so many ranks and rounded.
struct Combine {
  byte* out;
  const byte* prior;
  std::span<const byte* const> sources;
  std::size_t count;  // elements
  DType dtype;
  Op op;
  int ranks;
};

// A sum of `sources` in their wire form (base/wire.hpp), rounded to that form (host::Requantise).
// from_elements: the one source holds elements. to_elements: the result holds elements.
struct Requantise {
  byte* out;
  std::span<const byte* const> sources;
  std::size_t count;  // elements
  DType dtype;
  Op op;
  Wire wire;
  bool from_elements, to_elements;
};

// The memory of a call and what works on it. Order: on a GPU everything is enqueued on the call's stream.
class Space {
 public:
  virtual ~Space() = default;
  virtual Memory memory() const = 0;
  virtual void* stream() const { return nullptr; }  // of the call; null on the host
  // Returns the bytes of a message from which on its start costs little.
  virtual std::size_t grain() const = 0;
  // Returns at least `bytes` bytes, kept until the next request for the same purpose and slot.
  virtual byte* scratch(Scratch purpose, int slot, std::size_t bytes) = 0;
  // Copies; `to` may be `from`.
  virtual void copy(byte* to, const byte* from, std::size_t bytes) = 0;
  virtual void combine(const Combine& sum) = 0;
  virtual void requantise(const Requantise& sum) = 0;
};

}  // namespace unisono::nodes
