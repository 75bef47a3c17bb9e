#include "moe/cuda/copies.hpp"

#include <algorithm>

#include "cuda/api.hpp"

namespace unisono::moe {

static constexpr std::size_t kWord = sizeof(std::uint32_t);

Copies::Copies(const gpu::Work& work) : work_(work), kept_(at(work.dims.handles)) {
  const gpu::Space& s = work_.space;
  const std::size_t ranks = at(work_.dims.ranks), of_chunks = 2 * ranks * at(s.chunks) * kWord;
  const std::size_t tables = s.first_there + ranks * kWord - s.source_rows;
  void* pinned = nullptr;
  cuda::check(cudaHostAlloc(&pinned, of_chunks + tables, cudaHostAllocPortable), "pinning memory");
  loaded_.reset(static_cast<std::uint32_t*>(pinned));
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  stream_.reset(stream);
  cudaEvent_t event = nullptr;
  cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  reached_.reset(event);
}

void Copies::load(cudaStream_t stream) {
  const gpu::Space& s = work_.space;
  const std::size_t ranks = at(work_.dims.ranks), width = at(s.chunks) * kWord;
  const byte* const slot = work_.own + work_.slot;
  const byte* const tokens = slot + s.matrix + at(work_.dims.experts) * kWord;  // behind those of experts
  const std::size_t pitch = s.columns * kWord;
  const auto load = [&](void* to, const byte* from, std::size_t bytes) {
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "copying counts");
  };
  std::uint32_t* const come = loaded_.get() + ranks * at(s.chunks);
  load(loaded_.get(), tokens + at(work_.dims.rank) * pitch, ranks * width);
  cuda::check(cudaMemcpy2DAsync(come, width, tokens + at(work_.dims.rank) * width, pitch, width, ranks,
                                cudaMemcpyDeviceToHost, stream),
              "copying counts");
  load(come + ranks * at(s.chunks), slot + s.source_rows, s.first_there + ranks * kWord - s.source_rows);
}

void Copies::keep(int slot) {
  const gpu::Space& s = work_.space;
  const std::size_t ranks = at(work_.dims.ranks), of_chunks = ranks * at(s.chunks);
  const std::uint32_t* const tables = loaded_.get() + 2 * of_chunks;
  const auto words = [](const std::uint32_t* from, std::size_t count) {
    return std::vector<std::uint32_t>(from, from + count);
  };
  const auto table = [&](std::size_t offset) {
    return words(tables + (offset - s.source_rows) / kWord, ranks);
  };
  kept_[at(slot)] = Counts{.sent = words(loaded_.get(), of_chunks),
                           .come = words(loaded_.get() + of_chunks, of_chunks),
                           .first_there = table(s.first_there),
                           .first_here = table(s.first_rows),
                           .rows_here = table(s.source_rows),
                           .rows = tables[(s.rows - s.source_rows) / kWord]};
}

Positions Copies::of_chunks(std::span<const std::uint32_t> counts, int peer, std::uint32_t chunk,
                            std::size_t kept) const {
  const std::size_t chunks = at(work_.space.chunks);
  const auto end_of = [&](std::size_t end) {  // of the tokens before a chunk
    std::size_t tokens = 0;
    for (const std::uint32_t count : counts.subspan(at(peer) * chunks, std::min(end, chunks)))
      tokens += count;
    return std::min(tokens, kept);
  };
  const std::size_t first = end_of(chunk);
  return {first, end_of(chunk + gpu::kChunksOfCopy) - first};
}

Positions Copies::to(int slot, int peer, std::uint32_t chunk) const {
  std::size_t kept = work_.dims.max_tokens;
  if (work_.dims.layout == MoeLayout::flat)
    kept = work_.dims.capacity - std::min(work_.dims.capacity, first_there(slot, peer));
  return of_chunks(of(slot).sent, peer, chunk, kept);
}
Positions Copies::from(int slot, int peer, std::uint32_t chunk) const {
  return of_chunks(of(slot).come, peer, chunk, of(slot).rows_here[at(peer)]);
}

void Copies::follow(cudaStream_t stream) {
  cuda::check(cudaEventRecord(reached_.get(), stream), "an event");
  cuda::check(cudaStreamWaitEvent(stream_.get(), reached_.get(), 0), "an event");
}
void Copies::join(cudaStream_t stream) {
  cuda::check(cudaEventRecord(reached_.get(), stream_.get()), "an event");
  cuda::check(cudaStreamWaitEvent(stream, reached_.get(), 0), "an event");
}

void Copies::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0)
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_.get()),
                "a copy to a peer");
}

void Copies::signal(gpu::Told kind, int peer, std::uint32_t count) {
  const int slot = gpu::slot_of(work_.dims, kind, work_.dims.rank);
  cuda::write_signal(&work_.area.signal[peer][slot].count, count, stream_.get());
}

}  // namespace unisono::moe
