#include "moe/cuda/copies.hpp"

#include <algorithm>

#include "cuda/api.hpp"

namespace unisono::moe {

static constexpr std::size_t kWord = sizeof(std::uint32_t);

Copies::Copies(const gpu::Work& work)
    : dims_(work.dims), space_(work.space), kept_(static_cast<std::size_t>(work.dims.handles)) {
  const std::size_t ranks = at(dims_.ranks), of_chunks = 2 * ranks * at(space_.chunks) * kWord;
  const std::size_t tables = space_.first_there + ranks * kWord - space_.source_rows;
  void* pinned = nullptr;
  cuda::check(cudaHostAlloc(&pinned, of_chunks + tables, cudaHostAllocPortable), "pinning memory");
  loaded_ = static_cast<std::uint32_t*>(pinned);
  cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  cuda::check(cudaEventCreateWithFlags(&reached_, cudaEventDisableTiming), "making an event");
}

Copies::~Copies() {
  if (reached_) cudaEventDestroy(reached_);
  if (stream_) cudaStreamDestroy(stream_);
  if (loaded_) cudaFreeHost(loaded_);
}

void Copies::load(const gpu::Work& work, cudaStream_t stream) {
  const std::size_t ranks = at(dims_.ranks), width = at(space_.chunks) * kWord;
  const byte* const slot = work.own + work.slot;
  const byte* const tokens = slot + space_.matrix + at(dims_.experts) * kWord;  // behind those of experts
  const std::size_t pitch = space_.columns * kWord;
  const auto load = [&](void* to, const byte* from, std::size_t bytes) {
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "copying counts");
  };
  std::uint32_t* const come = loaded_ + ranks * at(space_.chunks);
  load(loaded_, tokens + at(dims_.rank) * pitch, ranks * width);
  cuda::check(cudaMemcpy2DAsync(come, width, tokens + at(dims_.rank) * width, pitch, width, ranks,
                                cudaMemcpyDeviceToHost, stream),
              "copying counts");
  load(come + ranks * at(space_.chunks), slot + space_.source_rows,
       space_.first_there + ranks * kWord - space_.source_rows);
}

void Copies::keep(int slot) {
  const std::size_t ranks = at(dims_.ranks), of_chunks = ranks * at(space_.chunks);
  const std::uint32_t* const tables = loaded_ + 2 * of_chunks;
  const auto words = [](const std::uint32_t* from, std::size_t count) {
    return std::vector<std::uint32_t>(from, from + count);
  };
  const auto table = [&](std::size_t offset) {
    return words(tables + (offset - space_.source_rows) / kWord, ranks);
  };
  kept_[at(slot)] = Counts{.sent = words(loaded_, of_chunks),
                           .come = words(loaded_ + of_chunks, of_chunks),
                           .first_there = table(space_.first_there),
                           .first_here = table(space_.first_rows),
                           .rows_here = table(space_.source_rows),
                           .rows = tables[(space_.rows - space_.source_rows) / kWord]};
}

Positions Copies::of_chunks(std::span<const std::uint32_t> counts, int peer, std::uint32_t chunk,
                            std::size_t kept) const {
  const std::size_t chunks = at(space_.chunks);
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
  std::size_t kept = dims_.max_tokens;
  if (dims_.layout == MoeLayout::flat)
    kept = dims_.capacity - std::min(dims_.capacity, first_there(slot, peer));
  return of_chunks(of(slot).sent, peer, chunk, kept);
}
Positions Copies::from(int slot, int peer, std::uint32_t chunk) const {
  return of_chunks(of(slot).come, peer, chunk, of(slot).rows_here[at(peer)]);
}

void Copies::follow(cudaStream_t stream) {
  cuda::check(cudaEventRecord(reached_, stream), "an event");
  cuda::check(cudaStreamWaitEvent(stream_, reached_, 0), "an event");
}
void Copies::join(cudaStream_t stream) {
  cuda::check(cudaEventRecord(reached_, stream_), "an event");
  cuda::check(cudaStreamWaitEvent(stream, reached_, 0), "an event");
}

void Copies::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0)
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "a copy to a peer");
}

void Copies::signal(const gpu::Work& work, gpu::Told kind, int peer, std::uint32_t count) {
  const int number = static_cast<int>(kind) * dims_.ranks + dims_.rank;
  const auto at = reinterpret_cast<CUdeviceptr>(&work.area.signal[peer][number].count);
  cuda::check(cuda::driver().write_value(stream_, at, count, CU_STREAM_WRITE_VALUE_DEFAULT), "a signal");
}

}  // namespace unisono::moe
