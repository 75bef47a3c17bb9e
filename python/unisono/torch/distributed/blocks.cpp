#include "blocks.hpp"

#include <ATen/ATen.h>

namespace unisono_torch {

at::Tensor Blocks::make(int64_t elements, const at::TensorOptions& options) {
  const std::size_t bytes = static_cast<std::size_t>(elements) * options.dtype().itemsize();
  const std::scoped_lock lock(making_);
  std::shared_ptr<void> block = take(bytes);
  if (!everyone(block != nullptr, bytes)) block = lend(communicator_.empty(bytes));
  return at::from_blob(block.get(), {elements}, [block](void*) {}, options);
}

void Blocks::close() {
  const std::scoped_lock lock(mutex_);
  closed_ = true;
  left_.clear();
}

std::shared_ptr<void> Blocks::take(std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  const auto found = left_.lower_bound(bytes);
  if (found == left_.end() || found->first > 2 * bytes) return nullptr;
  return lend(left_.extract(found).mapped());
}

std::shared_ptr<void> Blocks::lend(const unisono::Buffer& block) {
  return {block.data(), [self = shared_from_this(), block](void*) {
            const std::scoped_lock lock(self->mutex_);
            if (!self->closed_) self->left_.emplace(block.bytes(), block);
          }};
}

// Returns whether every rank has a block that is left.
bool Blocks::everyone(bool has, std::size_t bytes) {
  struct Wish {
    std::uint64_t bytes, has;
  };
  const Wish mine{bytes, has};
  std::vector<Wish> all(static_cast<std::size_t>(communicator_.size()));
  communicator_.all_gather(
      {.in = &mine, .out = all.data(), .count = sizeof mine, .dtype = unisono::DType::u8});
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r].bytes != all[0].bytes)
      throw unisono::UsageError("rank 0 allocates " + std::to_string(all[0].bytes) + " bytes, but rank " +
                                std::to_string(r) + " " + std::to_string(all[r].bytes) +
                                ": allocate tensors of one size on every rank.");
  return std::all_of(all.begin(), all.end(), [](const Wish& wish) { return wish.has; });
}

}  // namespace unisono_torch
