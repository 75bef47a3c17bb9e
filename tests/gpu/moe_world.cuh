// Tokens of all ranks, sent by the engine of GPUs and by that of the host: every byte is alike.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "unisono/communicator.hpp"
#include "unisono/error.hpp"
#include "unisono/moe.hpp"

namespace {

using namespace unisono;
using Bytes = std::vector<unsigned char>;

void check(cudaError_t result, const std::string& what) {
  if (result != cudaSuccess) throw std::runtime_error(what + ": " + cudaGetErrorString(result));
}
void expect(bool right, const std::string& what) {
  if (!right) throw std::runtime_error(what);
}

float get(const unsigned char* at, DType dtype) {
  if (dtype == DType::f32) return *reinterpret_cast<const float*>(at);
  if (dtype == DType::f16) return __half2float(*reinterpret_cast<const __half*>(at));
  return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at));
}
void set(unsigned char* at, DType dtype, float value) {
  if (dtype == DType::f32) *reinterpret_cast<float*>(at) = value;
  else if (dtype == DType::f16) *reinterpret_cast<__half*>(at) = __float2half(value);
  else *reinterpret_cast<__nv_bfloat16*>(at) = __float2bfloat16(value);
}
std::size_t size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

struct Case {
  MoeLayout layout = MoeLayout::flat;
  DType dtype = DType::bf16;
  int experts_of_rank = 4, top_k = 3;
  std::size_t hidden = 264, max_tokens = 57;
  MoeOptions options{};
  bool weights = true, wide_index = true;
  int crowd = 0;   // of 8 indices, those of expert 1
  int masked = 1;  // of 8 indices
  std::vector<std::size_t> more{};
  std::size_t row_bytes = 0;  // of x; 0: hidden elements
  std::size_t few = 0;        // the most tokens in calls of odd seeds; 0: max_tokens
  bool two_steps = false;     // calls begin and end apart
  std::size_t most_of(unsigned seed) const { return few > 0 && seed % 2 == 1 ? few : max_tokens; }
  std::string text() const {
    return "layout " + std::to_string(static_cast<int>(layout)) + ", dtype " +
           std::to_string(static_cast<int>(dtype)) + ", scales " +
           std::to_string(static_cast<int>(options.scales)) + ", hidden " + std::to_string(hidden) +
           ", top_k " + std::to_string(top_k) + ", alignment " + std::to_string(options.alignment) +
           ", rows of " + std::to_string(row_bytes) + ", few " + std::to_string(few);
  }
};

struct Tokens {
  std::size_t n = 0, most = 0;
  Bytes x;
  std::vector<Bytes> more;
  std::vector<std::int64_t> wide;
  std::vector<std::int32_t> narrow;
  std::vector<float> weights;
};

Tokens make_tokens(const Case& c, int rank, int ranks, unsigned seed, std::size_t n) {
  std::mt19937 random(seed * 977 + static_cast<unsigned>(rank));
  std::normal_distribution<float> normal;
  Tokens made;
  made.n = n;
  made.most = c.most_of(seed);
  made.x.resize(n * c.hidden * size(c.dtype) + 16);
  for (std::size_t i = 0; i < n * c.hidden; ++i) {
    float value = normal(random) * std::exp2(static_cast<float>(static_cast<int>((i / 128 * 7) % 24) - 12));
    if (i % 1009 == 7) value = 0;
    if (i % 30011 == 30010) value = INFINITY;
    set(made.x.data() + i * size(c.dtype), c.dtype, value);
  }
  const int experts = c.experts_of_rank * ranks;
  for (std::size_t i = 0; i < n * static_cast<std::size_t>(c.top_k); ++i) {
    const int dice = static_cast<int>(random() % 8);
    const int expert = dice < c.masked             ? -1
                       : dice < c.masked + c.crowd ? 1
                                                   : static_cast<int>(random() % experts);
    made.wide.push_back(expert);
    made.narrow.push_back(expert);
    made.weights.push_back(normal(random));
  }
  made.wide.push_back(0), made.narrow.push_back(0), made.weights.push_back(0);  // never empty
  for (const std::size_t bytes : c.more) {
    made.more.emplace_back(n * bytes + 1);
    for (auto& one : made.more.back()) one = static_cast<unsigned char>(random());
  }
  return made;
}

struct Rank {
  int rank, ranks;
  Communicator comm;
  cudaStream_t stream = nullptr;
  std::vector<void*> made;
  std::string doing;  // for the text of errors

  Rank(const std::shared_ptr<Bootstrap>& bootstrap, const Communicator::Options& options)
      : rank(bootstrap->rank()), ranks(bootstrap->size()), comm(bootstrap, options) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  }
  // Memory is made before any kernel of a case starts: making it may wait for the GPU.
  unsigned char* memory(std::size_t bytes) {
    void* at = nullptr;
    check(cudaMalloc(&at, bytes + 16), "memory");
    check(cudaMemset(at, 0xee, bytes + 16), "memory");
    made.push_back(at);
    return static_cast<unsigned char*>(at);
  }
  void ready() {
    check(cudaDeviceSynchronize(), "getting ready");
    comm.barrier();
  }
  void write(void* at, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(at, from, bytes, cudaMemcpyHostToDevice, stream), "a copy");
    comm.synchronize(stream);
  }
  // Waits for the stream first: a copy that waits for a kernel on the GPU may hold up those of other ranks.
  Bytes read(const void* at, std::size_t bytes) {
    comm.synchronize(stream);
    Bytes host(bytes + 1);
    check(cudaMemcpyAsync(host.data(), at, bytes, cudaMemcpyDeviceToHost, stream), "a copy");
    comm.synchronize(stream);
    host.resize(bytes);
    return host;
  }
  void free() {
    comm.synchronize(stream);
    comm.barrier();
    for (void* at : made) cudaFree(at);
    made.clear();
    comm.barrier();
  }
};

// The tokens of a rank on its GPU.
struct OnGpu {
  OnGpu(Rank& rank, const Case& c) : rank(rank), c(c) {
    const std::size_t k = static_cast<std::size_t>(c.top_k);
    x = rank.memory(c.max_tokens * c.hidden * size(c.dtype));
    idx = rank.memory(c.max_tokens * k * 8);
    weights = rank.memory(c.max_tokens * k * 4);
    for (const std::size_t bytes : c.more) more.push_back(rank.memory(c.max_tokens * bytes));
  }
  void write(const Tokens& tokens) {
    const std::size_t pairs = tokens.n * static_cast<std::size_t>(c.top_k);
    n = tokens.n;
    most = tokens.most;
    rank.write(x, tokens.x.data(), n * c.hidden * size(c.dtype));
    if (c.wide_index) rank.write(idx, tokens.wide.data(), pairs * 8);
    else rank.write(idx, tokens.narrow.data(), pairs * 4);
    rank.write(weights, tokens.weights.data(), pairs * 4);
    for (std::size_t m = 0; m < more.size(); ++m) rank.write(more[m], tokens.more[m].data(), n * c.more[m]);
  }
  MoeTokens tokens() {
    payloads.clear();
    for (std::size_t m = 0; m < more.size(); ++m) payloads.push_back({more[m], c.more[m]});
    return {.x = x,
            .tokens = n,
            .topk_idx = idx,
            .index = c.wide_index ? DType::i64 : DType::i32,
            .weights = c.weights ? reinterpret_cast<float*>(weights) : nullptr,
            .max_tokens = most,
            .more = payloads,
            .row_bytes = c.row_bytes,
            .stream = rank.stream};
  }
  Rank& rank;
  const Case& c;
  std::size_t n = 0, most = 0;
  unsigned char *x, *idx, *weights;
  std::vector<unsigned char*> more;
  std::vector<MoePayload> payloads;
};

MoeTokens on_host(const Case& c, const Tokens& tokens, std::vector<MoePayload>& payloads) {
  payloads.clear();
  for (std::size_t m = 0; m < tokens.more.size(); ++m) payloads.push_back({tokens.more[m].data(), c.more[m]});
  return {.x = tokens.x.data(),
          .tokens = tokens.n,
          .topk_idx = c.wide_index ? static_cast<const void*>(tokens.wide.data()) : tokens.narrow.data(),
          .index = c.wide_index ? DType::i64 : DType::i32,
          .weights = c.weights ? tokens.weights.data() : nullptr,
          .max_tokens = tokens.most,
          .more = payloads,
          .row_bytes = c.row_bytes};
}

// Compares rows of an array on the GPU with those of the host's engine.
void compare(Rank& rank, const char* what, const void* gpu, const void* host, std::size_t first,
             std::size_t rows, std::size_t bytes) {
  expect((gpu == nullptr) == (host == nullptr), std::string(what) + " is there on one engine alone");
  if (!gpu || rows * bytes == 0) return;
  const Bytes seen = rank.read(static_cast<const unsigned char*>(gpu) + first * bytes, rows * bytes);
  const auto* const right = static_cast<const unsigned char*>(host) + first * bytes;
  for (std::size_t i = 0; i < seen.size(); ++i)
    if (seen[i] != right[i])
      throw std::runtime_error(std::string(what) + " differs in row " + std::to_string(first + i / bytes) +
                               ", byte " + std::to_string(i % bytes) + ": " + std::to_string(seen[i]) +
                               ", not " + std::to_string(right[i]));
}

void compare(Rank& rank, const Case& c, const Moe& moe, const MoeReceived& gpu, const MoeReceived& host) {
  const std::size_t local = static_cast<std::size_t>(moe.local_experts()),
                    ranks = static_cast<std::size_t>(rank.ranks);
  const std::size_t k = static_cast<std::size_t>(c.top_k);
  const bool pairs = c.layout == MoeLayout::expert_major, by_rank = c.layout == MoeLayout::rank_major;
  compare(rank, "rows", gpu.rows, host.rows, 0, 1, 4);
  if (c.options.host_counts)
    expect(gpu.rows_now == static_cast<std::size_t>(*host.rows), "rows_now is wrong");
  compare(rank, "dropped", gpu.dropped, host.dropped, 0, 1, 4);
  compare(rank, "counts", gpu.counts, host.counts, 0, local, 4);
  compare(rank, "offsets", gpu.offsets, host.offsets, 0, local + 1, 4);
  compare(rank, "source_rows", gpu.source_rows, host.source_rows, 0, ranks, 4);
  if (pairs) compare(rank, "row_expert", gpu.row_expert, host.row_expert, 0, moe.rows_held(), 4);
  else
    compare(rank, "expert_rows", gpu.expert_rows, host.expert_rows, 0,
            static_cast<std::size_t>(host.offsets[local]), 4);
  const bool scaled = c.options.scales != MoeScales::none;
  const std::size_t width = c.row_bytes ? c.row_bytes : scaled ? c.hidden : c.hidden * size(c.dtype);
  for (std::size_t s = 0; s < (by_rank ? ranks : 1); ++s) {
    const std::size_t first = s * c.max_tokens;
    const std::size_t rows = static_cast<std::size_t>(by_rank ? host.source_rows[s] : *host.rows);
    const std::size_t tables = by_rank ? c.max_tokens : rows;
    compare(rank, "x", gpu.x, host.x, first, rows, width);
    compare(rank, "scales", gpu.scales, host.scales, first, rows, moe.scale_bytes());
    for (std::size_t m = 0; m < c.more.size(); ++m)
      compare(rank, "more", gpu.more.at(m), host.more.at(m), first, rows, c.more[m]);
    if (!pairs) compare(rank, "topk_idx", gpu.topk_idx, host.topk_idx, first, tables, k * 4);
    if (host.weights) compare(rank, "weights", gpu.weights, host.weights, first, tables, pairs ? 4 : k * 4);
  }
}

// Numbers for y and bias, alike on both engines.
Bytes numbers(std::size_t count, DType dtype, unsigned seed) {
  Bytes made(count * size(dtype) + 16);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t mixed = static_cast<std::uint32_t>((i + seed * 7919u) * 2654435761u);
    set(made.data() + i * size(dtype), dtype,
        static_cast<float>(static_cast<int>(mixed >> 8) - (1 << 23)) * 1e-6f);
  }
  return made;
}

void compare_sums(const Bytes& gpu, const Bytes& host, std::size_t count, DType dtype) {
  for (std::size_t i = 0; i < count; ++i) {
    const float a = get(gpu.data() + i * size(dtype), dtype), b = get(host.data() + i * size(dtype), dtype);
    if (std::memcmp(gpu.data() + i * size(dtype), host.data() + i * size(dtype), size(dtype)) != 0 &&
        !(std::isnan(a) && std::isnan(b)))
      throw std::runtime_error("element " + std::to_string(i) + " of a sum is " + std::to_string(a) +
                               ", not " + std::to_string(b));
  }
}

constexpr MoeLayout kLayouts[] = {MoeLayout::flat, MoeLayout::rank_major, MoeLayout::expert_major};

// Both engines, with what a case gives them.
struct Pair {
  Pair(Rank& rank, const Case& c)
      : rank(rank),
        c(c),
        shape{.experts = c.experts_of_rank * rank.ranks,
              .top_k = c.top_k,
              .hidden = c.hidden,
              .max_tokens = c.max_tokens,
              .dtype = c.dtype},
        host(rank.comm, shape, options(Memory::host)),
        gpu(rank.comm, shape, options(Memory::device)),
        on_gpu(rank, c),
        y(rank.memory(gpu.rows_held() * c.hidden * size(c.dtype))),
        bias(rank.memory(c.max_tokens * c.hidden * size(c.dtype))),
        out(rank.memory(c.max_tokens * c.hidden * size(c.dtype))),
        row_weights(rank.memory(gpu.rows_held() * 4)) {
    rank.ready();
  }
  MoeOptions options(Memory memory) const {
    MoeOptions all = c.options;
    all.layout = c.layout;
    all.memory = memory;
    for (const std::size_t bytes : c.more) all.more_bytes += bytes;
    return all;
  }
  std::size_t tokens_of(unsigned seed) const {
    if (rank.rank == 1) return 0;
    return seed == 0 ? c.max_tokens
                     : (seed * 31 + static_cast<unsigned>(rank.rank) * 17) % (c.most_of(seed) + 1);
  }
  MoeReceived dispatched(const MoeTokens& tokens, const std::optional<MoeHandle>& handle) {
    if (!c.two_steps) return gpu.dispatch(tokens, handle);
    gpu.dispatch_begin(tokens, handle);
    return gpu.dispatch_end();
  }
  void combine(const MoeOutputs& outputs, const MoeHandle& handle) {
    if (!c.two_steps) return gpu.combine(outputs, handle);
    gpu.combine_begin(outputs, handle);
    gpu.combine_end();
  }
  // Dispatches by both, and compares.
  void dispatch(unsigned seed, const std::optional<std::pair<MoeHandle, MoeHandle>>& kept = std::nullopt) {
    const std::size_t n = kept ? host.tokens_of(kept->first) : tokens_of(seed);
    const Tokens tokens = make_tokens(c, rank.rank, rank.ranks, seed, n);
    on_gpu.write(tokens);
    std::vector<MoePayload> payloads;
    MoeTokens here = on_host(c, tokens, payloads), there = on_gpu.tokens();
    if (kept) here.topk_idx = there.topk_idx = nullptr;
    rank.doing = "host dispatch " + std::to_string(seed);
    const MoeReceived right = host.dispatch(here, kept ? std::optional(kept->first) : std::nullopt);
    rank.doing = "dispatch " + std::to_string(seed);
    const MoeReceived seen = dispatched(there, kept ? std::optional(kept->second) : std::nullopt);
    rank.doing = "comparing dispatch " + std::to_string(seed);
    compare(rank, c, gpu, seen, right);
    handles = {right.handle, seen.handle};
    received = seen.x;
  }
  void combine(unsigned seed, const std::pair<MoeHandle, MoeHandle>& of, bool with_bias, bool own_weights,
               std::size_t width, DType dtype) {
    const std::size_t n = host.tokens_of(of.first), rows = host.rows_held();
    rank.doing = "writing y " + std::to_string(seed);
    const Bytes ys = numbers(rows * width, dtype, seed + static_cast<unsigned>(rank.rank));
    const Bytes biases = numbers(n * width, dtype, seed + 99);
    const Bytes weights = numbers(rows, DType::f32, seed + 5);
    // ranks have y in turn in memory of their own, and where rows have come
    const bool lends =
        c.options.scales == MoeScales::none && (seed + static_cast<unsigned>(rank.rank)) % 3 > 0;
    void* const rows_of_y = lends ? received : y;
    rank.write(rows_of_y, ys.data(), rows * width * size(dtype));
    rank.write(bias, biases.data(), n * width * size(dtype));
    rank.write(row_weights, weights.data(), rows * 4);
    Bytes right(n * width * size(dtype) + 16, 0xee);
    MoeOutputs outputs{.y = ys.data(), .row_bytes = width * size(dtype), .dtype = dtype, .out = right.data()};
    if (with_bias) outputs.bias = biases.data();
    if (own_weights) outputs.weights = reinterpret_cast<const float*>(weights.data());
    rank.doing = "host combine " + std::to_string(seed);
    host.combine(outputs, of.first);
    rank.doing = "combine " + std::to_string(seed);
    outputs.y = rows_of_y;
    outputs.out = out;
    outputs.stream = rank.stream;
    if (with_bias) outputs.bias = bias;
    if (own_weights) outputs.weights = reinterpret_cast<const float*>(row_weights);
    combine(outputs, of.second);
    compare_sums(rank.read(out, n * width * size(dtype)), right, n * width, dtype);
  }
  void round(unsigned seed) {
    dispatch(seed);
    combine(seed, handles, seed % 2 == 1, c.layout == MoeLayout::expert_major && seed % 3 == 2, c.hidden,
            c.dtype);
  }
  void end() {
    rank.comm.synchronize(rank.stream);
    rank.comm.barrier();
    rank.free();
  }
  Rank& rank;
  const Case& c;
  MoeShape shape;
  Moe host, gpu;
  OnGpu on_gpu;
  unsigned char *y, *bias, *out, *row_weights;
  std::pair<MoeHandle, MoeHandle> handles;
  void* received = nullptr;  // x of the last dispatch
};

}  // namespace
