// Cases of a moe on GPUs whose calls the host does not wait for: one after another, and in graphs.
#pragma once

#include "moe_graph.cuh"

namespace {

// The result of a round of x alone: each token's row, summed over its ranks or pairs.
Bytes sum_on_host(Pair& pair, const Tokens& tokens) {
  std::vector<MoePayload> none;
  const MoeReceived d = pair.host.dispatch(on_host(pair.c, tokens, none));
  Bytes sums(tokens.x.size(), 0xee);
  const std::size_t bytes = pair.c.hidden * size(pair.c.dtype);
  pair.host.combine({.y = d.x, .row_bytes = bytes, .dtype = pair.c.dtype, .out = sums.data()}, d.handle);
  return sums;
}
// round: ranks combine in turn from where the rows have come, and from memory of their own.
const void* rows_of(Pair& pair, const MoeReceived& d, unsigned round) {
  if ((round + static_cast<unsigned>(pair.rank.rank)) % 3 != 0) return d.x;
  check(cudaMemcpyAsync(pair.y, d.x, d.rows_held * pair.c.hidden * size(pair.c.dtype),
                        cudaMemcpyDeviceToDevice, pair.rank.stream),
        "a copy");
  return pair.y;
}
void sum_on_gpu(Pair& pair, const MoeTokens& tokens, void* out, unsigned round) {
  const MoeReceived d = pair.gpu.dispatch(tokens);
  const std::size_t bytes = pair.c.hidden * size(pair.c.dtype);
  pair.gpu.combine({.y = rows_of(pair, d, round),
                    .row_bytes = bytes,
                    .dtype = pair.c.dtype,
                    .out = out,
                    .stream = pair.rank.stream},
                   d.handle);
}

// Calls one after another, of which the host waits for none.
void press(Rank& rank, std::size_t max_tokens, std::size_t few = 0) {
  constexpr unsigned kRounds = 20;
  for (const MoeLayout layout : kLayouts) {
    const Case c{.layout = layout, .max_tokens = max_tokens, .few = few};
    std::vector<std::unique_ptr<OnGpu>> given;
    std::vector<unsigned char*> outs;
    std::vector<Tokens> tokens;
    for (unsigned i = 0; i < kRounds; ++i) {
      given.push_back(std::make_unique<OnGpu>(rank, c));
      outs.push_back(rank.memory(c.max_tokens * c.hidden * size(c.dtype)));
    }
    Pair pair(rank, c);
    for (unsigned i = 0; i < kRounds; ++i) {
      tokens.push_back(make_tokens(c, rank.rank, rank.ranks, i, pair.tokens_of(i)));
      given[i]->write(tokens[i]);
    }
    for (unsigned i = 0; i < kRounds; ++i) sum_on_gpu(pair, given[i]->tokens(), outs[i], i);
    for (unsigned i = 0; i < kRounds; ++i) {
      const std::size_t count = tokens[i].n * c.hidden;
      compare_sums(rank.read(outs[i], count * size(c.dtype)), sum_on_host(pair, tokens[i]), count, c.dtype);
    }
    pair.end();
  }
}
void pressure(Rank& rank) {
  for (const std::size_t max_tokens : {2100, 301, 40, 8}) press(rank, max_tokens);
}

// A graph of a round, replayed with other routes in place, with calls outside of it between. few: of the
// graph alone.
void graphs(Rank& rank, std::size_t few) {
  for (const MoeLayout layout : kLayouts) {
    const Case c{.layout = layout,
                 .max_tokens = few > 0                           ? 1100u
                               : layout == MoeLayout::rank_major ? 9u
                                                                 : 60u,
                 .few = few};
    Pair pair(rank, c);
    const std::size_t n = rank.rank == 1 ? 0 : c.most_of(1), count = n * c.hidden;
    pair.on_gpu.write(make_tokens(c, rank.rank, rank.ranks, 1, n));
    Graph graph(rank, [&] { sum_on_gpu(pair, pair.on_gpu.tokens(), pair.out, 1); });
    for (unsigned i = 0; i < 100; ++i) {
      const bool outside = i % 10 == 9;
      const Tokens tokens = make_tokens(c, rank.rank, rank.ranks, 2 * i + (outside ? 0 : 1), n);
      pair.on_gpu.write(tokens);
      if (outside) sum_on_gpu(pair, pair.on_gpu.tokens(), pair.out, i);
      else graph.replay();
      compare_sums(rank.read(pair.out, count * size(c.dtype)), sum_on_host(pair, tokens), count, c.dtype);
    }
    for (unsigned i = 0; i < 20; ++i) graph.replay();
    pair.end();
    graph.end();
  }
}

void graphs(Rank& rank) { graphs(rank, 0); }

// A combine of a graph, replayed between others of its routing: no counts of the host are in it.
void capture_combine(Rank& rank, Case c) {
  for (const MoeLayout layout : kLayouts) {
    c.layout = layout;
    Pair pair(rank, c);
    pair.dispatch(0);
    const std::size_t bytes = c.hidden * size(c.dtype), all = pair.on_gpu.n * bytes;
    const MoeOutputs outputs{
        .y = pair.received, .row_bytes = bytes, .dtype = c.dtype, .out = pair.out, .stream = rank.stream};
    const auto combined = [&](const auto& call) {
      check(cudaMemsetAsync(pair.out, 0xee, all, rank.stream), "clearing");
      call();
      return rank.read(pair.out, all);
    };
    const auto combine = [&] { pair.combine(outputs, pair.handles.second); };
    const Bytes right = combined(combine);
    Graph graph(rank, combine);
    for (int i = 0; i < 6; ++i)
      expect(i % 3 == 2 ? combined(combine) == right : combined([&] { graph.replay(); }) == right,
             "combine " + std::to_string(i) + " differs");
    pair.end();
    graph.end();
  }
}

}  // namespace
