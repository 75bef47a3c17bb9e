// Cases of a moe on GPUs whose calls fail on every rank.
#pragma once

#include "moe_world.cuh"

namespace {

template <class Error>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) { return error.what(); }
  return "nothing";
}

void fails(Rank& rank, const std::string& got, const std::string& wanted) {
  expect(got == wanted, "the error is \"" + got + "\", not \"" + wanted + "\"");
  rank.made.clear();  // the communicator has failed, and nobody may meet
}

void index(Rank& rank) {
  const Case c{.top_k = 2};
  Pair pair(rank, c);
  Tokens tokens = make_tokens(c, rank.rank, rank.ranks, 0, 20);
  if (rank.rank == rank.ranks - 1) tokens.wide[13] = c.experts_of_rank * rank.ranks + 5;
  pair.on_gpu.write(tokens);
  rank.comm.barrier();
  const int experts = c.experts_of_rank * rank.ranks;
  fails(rank, text_of<UsageError>([&] {
          pair.gpu.dispatch(pair.on_gpu.tokens());
          rank.comm.synchronize(rank.stream);
        }),
        "topk_idx names expert " + std::to_string(experts + 5) + " for token 6, but there are " +
            std::to_string(experts) + ": give 0 to " + std::to_string(experts - 1) + ", or -1 for none.");
}

void overflow(Rank& rank) {
  const Case c{.layout = rank.ranks % 2 == 0 ? MoeLayout::flat : MoeLayout::expert_major,
               .top_k = 1,
               .options = {.capacity = 15},
               .crowd = 8,
               .masked = 0};
  Pair pair(rank, c);
  pair.on_gpu.write(make_tokens(c, rank.rank, rank.ranks, 0, 20));
  rank.comm.barrier();
  const std::string needed = std::to_string(20 * rank.ranks);
  fails(rank, text_of<ResourceError>([&] {
          pair.gpu.dispatch(pair.on_gpu.tokens());
          rank.comm.synchronize(rank.stream);
        }),
        "rank 0 would receive " + needed +
            " rows in this dispatch, but there is room for 15: give capacity=" + needed +
            " or more, or drop=True.");
}

void differs(Rank& rank) {
  const Case c{.more = {8, 4}};
  Pair pair(rank, c);
  pair.on_gpu.write(make_tokens(c, rank.rank, rank.ranks, 0, 20));
  rank.comm.barrier();
  MoeTokens tokens = pair.on_gpu.tokens();
  if (rank.rank == rank.ranks - 1) tokens.more = tokens.more.first(1);
  fails(rank, text_of<MismatchError>([&] { pair.gpu.dispatch(tokens); }),
        "rank 0 dispatches rows of 528 bytes by a new routing of at most 57 tokens, with weights, and "
        "further rows of 8 bytes and 4 "
        "bytes, but rank " +
            std::to_string(rank.ranks - 1) +
            " rows of 528 bytes by a new routing of at most 57 tokens, with weights, and further rows of 8 "
            "bytes: make the same "
            "call on every rank.");
}

}  // namespace
