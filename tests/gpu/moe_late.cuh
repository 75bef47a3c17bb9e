// Cases of a moe on GPUs whose ranks read late what has come, while others go on.
#pragma once

#include "moe_graph.cuh"

namespace {

// Takes that many cycles.
__global__ void spin(long long cycles) {
  const long long began = clock64();
  while (clock64() - began < cycles) {}
}

// The rows and tables that a rank keeps of a dispatch of flat or rank_major rows, by copies on its stream,
// which may be late.
struct Kept {
  explicit Kept(Pair& pair)
      : pair(pair), x(pair.rank.memory(bytes_of_x())), topk_idx(pair.rank.memory(bytes_of_idx())) {}
  std::size_t bytes_of_x() const { return pair.gpu.rows_held() * pair.c.hidden * size(pair.c.dtype); }
  std::size_t bytes_of_idx() const {
    return pair.gpu.rows_held() * static_cast<std::size_t>(pair.c.top_k) * 4;
  }
  void copy(void* to, const void* from, std::size_t bytes) const {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, pair.rank.stream), "a copy");
  }
  void keep_x(const void* from) const { copy(x, from, bytes_of_x()); }
  void keep_idx(const void* from) const { copy(topk_idx, from, bytes_of_idx()); }
  // Compares both with the rows of the host's dispatch of the same tokens.
  void compare_with_host(const Tokens& tokens) const {
    std::vector<MoePayload> none;
    const Case& c = pair.c;
    const MoeReceived right = pair.host.dispatch(on_host(c, tokens, none));
    const auto each = [&](std::size_t first, std::size_t rows) {
      compare(pair.rank, "x", x, right.x, first, rows, c.hidden * size(c.dtype));
      compare(pair.rank, "topk_idx", topk_idx, right.topk_idx, first, rows,
              static_cast<std::size_t>(c.top_k) * 4);
    };
    if (c.layout == MoeLayout::flat) return each(0, static_cast<std::size_t>(*right.rows));
    for (int s = 0; s < pair.rank.ranks; ++s)
      each(static_cast<std::size_t>(s) * c.max_tokens, static_cast<std::size_t>(right.source_rows[s]));
  }
  Pair& pair;
  unsigned char *x, *topk_idx;
};

// Loads the kernel, which would wait for those that run.
void load_dawdling(const Rank& rank) { spin<<<1, 1, 0, rank.stream>>>(1); }
// Makes a rank late in some rounds.
void dawdle(const Rank& rank, unsigned round) {
  if ((round + static_cast<unsigned>(rank.rank)) % 3 == 0) spin<<<1, 1, 0, rank.stream>>>(200'000);
}

// Dispatches without a combine between. Some ranks read at the last moment: rows until the second one after
// begins, and tables as long as the handle is valid.
void late(Rank& rank, const Case& c) {
  constexpr unsigned kRounds = 24, kHandles = 4;
  Pair pair(rank, c);
  std::vector<std::unique_ptr<OnGpu>> given;
  std::vector<Tokens> tokens;
  std::vector<Kept> kept;
  std::vector<MoeReceived> seen;
  for (unsigned i = 0; i < kRounds; ++i) {
    given.push_back(std::make_unique<OnGpu>(rank, c));
    kept.emplace_back(pair);
    tokens.push_back(make_tokens(c, rank.rank, rank.ranks, i, pair.tokens_of(i)));
    given[i]->write(tokens[i]);
  }
  load_dawdling(rank);
  rank.ready();
  for (unsigned i = 0; i < kRounds + kHandles; ++i) {
    if (i < kRounds) seen.push_back(pair.gpu.dispatch(given[i]->tokens()));
    dawdle(rank, i);
    if (i >= 1 && i - 1 < kRounds) kept[i - 1].keep_x(seen[i - 1].x);
    if (i >= kHandles - 1 && i - (kHandles - 1) < kRounds)
      kept[i - (kHandles - 1)].keep_idx(seen[i - (kHandles - 1)].topk_idx);
  }
  for (unsigned i = 0; i < kRounds; ++i) kept[i].compare_with_host(tokens[i]);
  pair.end();
}

// The same in a graph of some dispatches that is replayed, with other tokens in place.
void late_graph(Rank& rank, const Case& c, unsigned dispatches) {
  constexpr unsigned kReplays = 6;
  Pair pair(rank, c);
  const std::size_t n = rank.rank == 1 ? 0 : c.max_tokens - static_cast<std::size_t>(rank.rank);
  std::vector<std::unique_ptr<OnGpu>> in_graph, given;
  std::vector<Tokens> tokens;
  std::vector<Kept> now, kept;
  for (unsigned i = 0; i < dispatches; ++i) {
    in_graph.push_back(std::make_unique<OnGpu>(rank, c));
    now.emplace_back(pair);
  }
  for (unsigned i = 0; i < dispatches * kReplays; ++i) {
    given.push_back(std::make_unique<OnGpu>(rank, c));
    kept.emplace_back(pair);
    tokens.push_back(make_tokens(c, rank.rank, rank.ranks, 2 * i, n));
    given[i]->write(tokens[i]);
  }
  for (unsigned i = 0; i < dispatches; ++i) in_graph[i]->write(tokens[i]);
  load_dawdling(rank);
  rank.ready();
  Graph graph(rank, [&] {
    for (unsigned i = 0; i < dispatches; ++i) {
      const MoeReceived d = pair.gpu.dispatch(in_graph[i]->tokens());
      dawdle(rank, i);
      now[i].keep_x(d.x);
      now[i].keep_idx(d.topk_idx);
    }
  });
  for (unsigned i = 0; i < dispatches * kReplays; i += dispatches) {
    for (unsigned j = 0; j < dispatches; ++j) {
      now[j].copy(in_graph[j]->x, given[i + j]->x, n * c.hidden * size(c.dtype));
      now[j].copy(in_graph[j]->idx, given[i + j]->idx, n * static_cast<std::size_t>(c.top_k) * 8);
    }
    graph.replay();
    for (unsigned j = 0; j < dispatches; ++j) {
      kept[i + j].keep_x(now[j].x);
      kept[i + j].keep_idx(now[j].topk_idx);
    }
  }
  for (unsigned i = 0; i < kept.size(); ++i) kept[i].compare_with_host(tokens[i]);
  pair.end();
  graph.end();
}

void late(Rank& rank) {
  for (const MoeLayout layout : {MoeLayout::flat, MoeLayout::rank_major}) {
    for (const std::size_t few : {0, 1}) late(rank, {.layout = layout, .max_tokens = 40, .few = few});
    for (const unsigned dispatches : {1, 2, 3, 5})
      late_graph(rank, {.layout = layout, .max_tokens = 40}, dispatches);
  }
}

}  // namespace
