// Symmetric memory of a group as tensors. Blocks that tensors have left are used again.
#pragma once

#include <map>

#include "backend.hpp"

namespace unisono_torch {

// To make a tensor is a collective call, as `Communicator::empty` is. Ranks need not drop tensors alike: they
// agree in each call whether a block is left on all of them. Which one a rank takes is its own affair.
class Blocks final : public std::enable_shared_from_this<Blocks> {
 public:
  // communicator: outlives the last `make`, but not the tensors.
  explicit Blocks(unisono::Communicator& communicator) : communicator_(communicator) {}

  // Returns a tensor on symmetric memory. Throws on every rank if one asks for another size.
  at::Tensor make(int64_t elements, const at::TensorOptions& options);
  // Frees the blocks that are left, and from now on those that tensors leave.
  void close();

 private:
  // Returns the smallest block that is left of this size to twice of it. Null: there is none.
  std::shared_ptr<void> take(std::size_t bytes);
  // Returns the block as a pointer whose end gives it back.
  std::shared_ptr<void> lend(const unisono::Buffer& block);
  bool everyone(bool has, std::size_t bytes);

  unisono::Communicator& communicator_;
  std::mutex making_;
  std::mutex mutex_;
  std::multimap<std::size_t, unisono::Buffer> left_;  // by bytes
  bool closed_ = false;
};

}  // namespace unisono_torch
