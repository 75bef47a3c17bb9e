// The phases that copy engines carry, so that other kernels have the SMs meanwhile.
#include <algorithm>

#include "moe/cuda/gpu_engine.hpp"

namespace unisono::moe {

void GpuEngine::know_counts() {
  copies_->load(stream_);
  impl_.synchronize(stream_);
  copies_->keep(slot_);
}

void GpuEngine::send_by_copies() {
  const Dims& d = work_.dims;
  const gpu::Space& s = work_.space;
  if (!dispatch_.routed) know_counts();
  dispatch_.copied = ++copied_;
  const std::uint32_t share = gpu::kChunksOfCopy * s.chunk_of(work_.tokens);
  std::uint32_t chunk = 0;
  for (bool more = true; more; chunk += gpu::kChunksOfCopy, dispatch_.first += share) {
    dispatch_.tokens = std::min(share, work_.tokens - dispatch_.first);
    more = dispatch_.first + dispatch_.tokens < work_.tokens;
    check(gpu::send(work_, dispatch_, std::min(blocks(send_blocks_), blocks_to_send()), stream_));
    copies_->follow(stream_);
    for (int i = 1; i < d.ranks; ++i) {  // each rank in an order of its own
      const int peer = (d.rank + i) % d.ranks;
      const Positions tokens = copies_->to(slot_, peer, chunk);
      const std::size_t from = s.leaving + at(peer) * d.max_tokens + tokens.first;
      const std::size_t to = copies_->first_there(slot_, peer) + tokens.first;
      const auto bring = [&](std::size_t array, std::size_t bytes) {
        copies_->copy(static_cast<byte*>(work_.area.memory[peer]) + array + to * bytes,
                      work_.own + array + from * bytes, tokens.count * bytes);
      };
      for (int p = 0; p < dispatch_.payloads.count; ++p)
        bring(dispatch_.payloads.of[p].to, dispatch_.payloads.of[p].bytes);
      if (d.scale_bytes > 0) bring(s.x(work_.epoch) + s.scales, d.scale_bytes);
      if (!more) copies_->signal(gpu::Told::copied, peer, copied_);
    }
  }
}

void GpuEngine::return_by_copies() {
  const Dims& d = work_.dims;
  const gpu::Space& s = work_.space;
  const auto chunks = static_cast<std::uint32_t>(s.chunks);
  combine_.returned = s.returned + returned_ % 2 * s.returned_bytes;
  combine_.chunks_before = returned_++ * chunks;
  copies_->follow(stream_);
  for (std::uint32_t chunk = 0; chunk < chunks; chunk += gpu::kChunksOfCopy)
    for (int i = 1; i < d.ranks; ++i) {
      const int peer = (d.rank + i) % d.ranks;
      const Positions tokens = copies_->from(slot_, peer, chunk);
      copies_->copy(static_cast<byte*>(work_.area.memory[peer]) + combine_.returned +
                        (at(d.rank) * d.max_tokens + tokens.first) * combine_.bytes,
                    combine_.y + (copies_->first_here(slot_, peer) + tokens.first) * combine_.bytes,
                    tokens.count * combine_.bytes);
      copies_->signal(gpu::Told::returned, peer, combine_.chunks_before + chunk + gpu::kChunksOfCopy);
    }
}

}  // namespace unisono::moe
