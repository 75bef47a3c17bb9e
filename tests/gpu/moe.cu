// Mixture of experts on GPUs, compared with the host's engine. Ranks are threads. tests/gpu/test_moe.py
// compiles and runs it.
//   moe CASE RANKS    exit status 0: all is as expected; 1: not, as stderr says; 77: too few GPUs here
#include "moe_world.cuh"

namespace {

constexpr MoeLayout kLayouts[] = {MoeLayout::flat, MoeLayout::rank_major, MoeLayout::expert_major};
constexpr DType kDTypes[] = {DType::bf16, DType::f16, DType::f32};

void run(Rank& rank, const Case& c, int rounds) {
  try {
    Pair pair(rank, c);
    for (int round = 0; round < rounds; ++round) pair.round(static_cast<unsigned>(round));
    pair.end();
  } catch (const std::exception& error) {
    throw std::runtime_error(c.text() + ", " + rank.doing + ": " + error.what());
  }
}

void layouts(Rank& rank) {
  for (const MoeLayout layout : kLayouts)
    for (const DType dtype : kDTypes)
      for (const std::size_t hidden : {264, 131})
        run(rank,
            {.layout = layout, .dtype = dtype, .hidden = hidden, .max_tokens = hidden == 131 ? 10u : 57u}, 4);
}

void routes(Rank& rank) {
  for (const MoeLayout layout : kLayouts) {
    run(rank, {.layout = layout, .top_k = 1, .weights = false, .wide_index = false}, 3);
    run(rank,
        {.layout = layout,
         .experts_of_rank = rank.ranks > 2 ? 3 : 8,
         .top_k = 8,
         .max_tokens = 700,
         .masked = 0},
        3);
    run(rank,
        {.layout = layout,
         .experts_of_rank = 32,
         .top_k = 32 / (rank.ranks > 4 ? 2 : 1),
         .hidden = 64,
         .max_tokens = 40},
        3);
    run(rank, {.layout = layout, .top_k = 2, .weights = false, .crowd = 8, .masked = 0}, 2);
    run(rank, {.layout = layout, .masked = 8}, 2);
    run(rank, {.layout = layout, .experts_of_rank = 8, .top_k = 5, .hidden = 40, .max_tokens = 2100}, 3);
    run(rank, {.layout = layout, .experts_of_rank = 32, .top_k = 8, .hidden = 64, .max_tokens = 64}, 3);
  }
}

void scaled(Rank& rank) {
  for (const MoeLayout layout : kLayouts)
    for (const DType dtype : kDTypes)
      for (const MoeScales scales : {MoeScales::e4m3_128, MoeScales::mx})
        for (const std::size_t hidden : {512, 264, 131})
          run(rank,
              {.layout = layout,
               .dtype = dtype,
               .hidden = hidden,
               .max_tokens = 33,
               .options = {.alignment = layout == MoeLayout::expert_major ? 16 : 1, .scales = scales}},
              2);
}

void payloads(Rank& rank) {
  for (const MoeLayout layout : kLayouts)
    run(rank,
        {.layout = layout,
         .options = {.alignment = layout == MoeLayout::expert_major ? 8 : 1},
         .more = {16, 3, 260, 2}},
        3);
}

// Rows of the caller's own width.
void rows(Rank& rank) {
  for (const MoeLayout layout : kLayouts)
    for (const std::size_t bytes : {1, 264, 130, 400, 528})
      run(rank,
          {.layout = layout,
           .options = {.alignment = layout == MoeLayout::expert_major ? 8 : 1},
           .more = {20},
           .row_bytes = bytes},
          2);
}

void dropped(Rank& rank) {
  for (const std::size_t capacity : {1, 40, 96, 2000})
    for (const int crowd : {0, 6}) {
      run(rank, {.layout = MoeLayout::flat, .options = {.capacity = capacity, .drop = true}, .crowd = crowd},
          3);
      for (const int alignment : {1, 16})
        run(rank,
            {.layout = MoeLayout::expert_major,
             .options = {.alignment = alignment, .capacity = capacity, .drop = true},
             .crowd = crowd},
            3);
    }
}

void widths(Rank& rank, Case c) {
  for (const MoeLayout layout : kLayouts) {
    c.layout = layout;
    Pair pair(rank, c);
    pair.dispatch(0);
    pair.combine(1, pair.handles, false, false, 3, DType::f32);
    pair.combine(2, pair.handles, true, false, 64, DType::f16);
    pair.combine(3, pair.handles, true, false, 100, DType::bf16);
    pair.combine(4, pair.handles, false, false, c.hidden / 2, DType::f32);
    pair.end();
  }
}

void handles(Rank& rank, Case c) {
  c.options.handles = 2;
  for (const MoeLayout layout : kLayouts) {
    c.layout = layout;
    c.options.alignment = layout == MoeLayout::expert_major ? 4 : 1;
    Pair pair(rank, c);
    pair.dispatch(0);
    const auto first = pair.handles;
    pair.dispatch(1);
    const auto second = pair.handles;
    pair.combine(2, second, false, false, c.hidden, c.dtype);
    pair.combine(3, first, true, false, c.hidden, c.dtype);
    pair.dispatch(4, first);
    pair.combine(5, first, false, false, c.hidden, c.dtype);
    pair.dispatch(6, second);
    pair.dispatch(7, second);
    pair.combine(8, second, false, false, c.hidden, c.dtype);
    pair.end();
  }
}

// x goes to the caller's memory.
void out(Rank& rank, const Case& c) {
  Pair pair(rank, c);
  unsigned char* const memory = rank.memory(pair.gpu.rows_held() * c.hidden * size(c.dtype));
  rank.ready();
  for (unsigned round = 0; round < 3; ++round) {
    const Tokens tokens = make_tokens(c, rank.rank, rank.ranks, round, pair.tokens_of(round));
    pair.on_gpu.write(tokens);
    std::vector<MoePayload> none;
    MoeTokens there = pair.on_gpu.tokens();
    there.out = memory;
    const MoeReceived right = pair.host.dispatch(on_host(c, tokens, none)), seen = pair.gpu.dispatch(there);
    expect(seen.x == memory, "x is not in the memory that was given");
    compare(rank, c, pair.gpu, seen, right);
  }
  pair.end();
}
void out(Rank& rank) {
  for (const std::size_t row_bytes : {0, 264, 33})
    for (const MoeLayout layout : kLayouts) out(rank, {.layout = layout, .row_bytes = row_bytes});
}

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
  for (const std::size_t max_tokens : {301, 40, 8}) press(rank, max_tokens);
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
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replayed = nullptr;
    check(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "a capture");
    sum_on_gpu(pair, pair.on_gpu.tokens(), pair.out, 1);
    check(cudaStreamEndCapture(rank.stream, &graph), "a capture");
    check(cudaGraphInstantiate(&replayed, graph, 0), "a graph");
    check(cudaGraphUpload(replayed, rank.stream), "a graph");
    rank.comm.barrier();  // no rank waits for the GPU while another one captures
    rank.ready();
    for (unsigned i = 0; i < 100; ++i) {
      const bool outside = i % 10 == 9;
      const Tokens tokens = make_tokens(c, rank.rank, rank.ranks, 2 * i + (outside ? 0 : 1), n);
      pair.on_gpu.write(tokens);
      if (outside) sum_on_gpu(pair, pair.on_gpu.tokens(), pair.out, i);
      else check(cudaGraphLaunch(replayed, rank.stream), "a graph");
      compare_sums(rank.read(pair.out, count * size(c.dtype)), sum_on_host(pair, tokens), count, c.dtype);
    }
    for (unsigned i = 0; i < 20; ++i) check(cudaGraphLaunch(replayed, rank.stream), "a graph");
    pair.end();
    check(cudaGraphExecDestroy(replayed), "a graph");
    check(cudaGraphDestroy(graph), "a graph");
    rank.comm.barrier();
  }
}

void graphs(Rank& rank) { graphs(rank, 0); }

// Few tokens in some calls of a Moe for many, of which the ranks are told. Kept routings of both kinds meet.
void few(Rank& rank) {
  for (const MoeLayout layout : kLayouts) {
    for (const std::size_t some : {1, 8, 40}) {
      run(rank, {.layout = layout, .max_tokens = 1100, .few = some}, 6);
      run(rank,
          {.layout = layout,
           .max_tokens = 301,
           .options = {.scales = MoeScales::e4m3_128},
           .more = {5},
           .few = some},
          4);
    }
    const Case c{.layout = layout, .max_tokens = 2100, .few = 8};
    Pair pair(rank, c);
    pair.dispatch(3);
    const auto first = pair.handles;
    pair.dispatch(2);
    const auto second = pair.handles;
    pair.dispatch(5);
    pair.combine(4, first, true, false, c.hidden, c.dtype);
    pair.combine(5, second, false, false, c.hidden, c.dtype);
    pair.dispatch(6, first);
    pair.combine(7, first, false, false, c.hidden, c.dtype);
    pair.dispatch(8, second);
    pair.combine(8, pair.handles, false, false, c.hidden, c.dtype);
    pair.end();
  }
  press(rank, 1100, 8);
  press(rank, 301, 40);
  graphs(rank, 8);
}

__global__ void multiply(const float* a, const float* b, float* c, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n * n; i += static_cast<int>(blockDim.x)) {
    float sum = 0;
    for (int k = 0; k < n; ++k) sum += a[i / n * n + k] * b[k * n + i % n];
    c[i] = sum;
  }
}

// Sending and receiving as two steps, with other work of the stream between.
void steps(Rank& rank, Case c) {
  constexpr int kSide = 64;
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, multiply), "loading a kernel");
  for (const MoeLayout layout : kLayouts) {
    c.layout = layout;
    Pair pair(rank, c);
    auto* const matrices = reinterpret_cast<float*>(rank.memory(3 * kSide * kSide * 4));
    const auto work = [&] {
      multiply<<<1, 256, 0, rank.stream>>>(matrices, matrices + kSide * kSide, matrices + 2 * kSide * kSide,
                                           kSide);
    };
    rank.ready();
    const std::size_t bytes = c.hidden * size(c.dtype);
    for (unsigned i = 0; i < 10; ++i) {
      const Tokens tokens = make_tokens(c, rank.rank, rank.ranks, i, pair.tokens_of(i));
      pair.on_gpu.write(tokens);
      pair.gpu.dispatch_begin(pair.on_gpu.tokens());
      work();
      const MoeReceived d = pair.gpu.dispatch_end();
      pair.gpu.combine_begin({.y = rows_of(pair, d, i),
                              .row_bytes = bytes,
                              .dtype = c.dtype,
                              .out = pair.out,
                              .stream = rank.stream},
                             d.handle);
      work();
      pair.gpu.combine_end();
      compare_sums(rank.read(pair.out, tokens.n * bytes), sum_on_host(pair, tokens), tokens.n * c.hidden,
                   c.dtype);
    }
    pair.end();
  }
}

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
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replayed = nullptr;
    check(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "a capture");
    combine();
    check(cudaStreamEndCapture(rank.stream, &graph), "a capture");
    check(cudaGraphInstantiate(&replayed, graph, 0), "a graph");
    check(cudaGraphUpload(replayed, rank.stream), "a graph");
    rank.comm.barrier();
    rank.ready();
    for (int i = 0; i < 6; ++i)
      expect(i % 3 == 2
                 ? combined(combine) == right
                 : combined([&] { check(cudaGraphLaunch(replayed, rank.stream), "a graph"); }) == right,
             "combine " + std::to_string(i) + " differs");
    pair.end();
    check(cudaGraphExecDestroy(replayed), "a graph");
    check(cudaGraphDestroy(graph), "a graph");
    rank.comm.barrier();
  }
}

// Many tokens whose counts the hosts know: copy engines bring the rows of flat and rank_major.
void copies(Rank& rank) {
  const Case many{.hidden = 104, .max_tokens = 2100, .options = {.host_counts = true}, .two_steps = true};
  for (const MoeLayout layout : kLayouts) {
    Case c = many;
    c.layout = layout;
    run(rank, c, 4);
    c.few = 9;  // calls of few tokens between
    run(rank, c, 5);
    c.few = 0;
    c.two_steps = false;  // by kernels
    run(rank, c, 3);
    c.two_steps = true;
    c.options.alignment = layout == MoeLayout::expert_major ? 16 : 1;
    c.more = {16, 3};
    for (const MoeScales scales : {MoeScales::e4m3_128, MoeScales::mx}) {
      c.options.scales = scales;
      run(rank, c, 3);
    }
    if (layout == MoeLayout::rank_major) continue;
    c.options.scales = MoeScales::none;
    c.options.drop = true;
    for (const std::size_t capacity : {1, 700}) {
      c.options.capacity = capacity;
      run(rank, c, 3);
    }
  }
  widths(rank, many);
  handles(rank, many);
  steps(rank, many);
  capture_combine(rank, many);
}

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

const std::map<std::string, void (*)(Rank&)>& cases() {
  static const std::map<std::string, void (*)(Rank&)> all{{"layouts", layouts},
                                                          {"routes", routes},
                                                          {"scaled", scaled},
                                                          {"payloads", payloads},
                                                          {"dropped", dropped},
                                                          {"widths", [](Rank& rank) { widths(rank, {}); }},
                                                          {"copies", copies},
                                                          {"handles", [](Rank& rank) { handles(rank, {}); }},
                                                          {"out", [](Rank& rank) { out(rank); }},
                                                          {"pressure", pressure},
                                                          {"graphs", [](Rank& rank) { graphs(rank); }},
                                                          {"few", few},
                                                          {"steps", [](Rank& rank) { steps(rank, {}); }},
                                                          {"index", index},
                                                          {"rows", rows},
                                                          {"overflow", overflow},
                                                          {"differs", differs}};
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 || !cases().contains(argv[1])) return 2;
  const int ranks = std::atoi(argv[2]), gpus = device_count();
  const bool shared = gpus < ranks;
  if (gpus == 0 || (shared && !std::getenv("UNISONO_SHARE_DEVICE"))) return 77;
  const auto bootstraps = thread_bootstraps(ranks, std::chrono::seconds(60));
  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < bootstraps.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        const int device = shared ? 0 : static_cast<int>(r);
        check(cudaSetDevice(device), "a device");
        Rank rank(bootstraps[r], {.timeout_s = 20, .device = device, .max_sms = shared ? 128 / ranks : 0});
        rank.comm.set_check(std::strcmp(argv[1], "differs") == 0);
        cases().at(argv[1])(rank);
      } catch (const std::exception& error) { texts[r] = error.what(); }
    });
  for (std::thread& thread : threads) thread.join();
  bool right = true;
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (!texts[r].empty()) std::fprintf(stderr, "rank %zu: %s\n", r, texts[r].c_str());
    right = right && texts[r].empty();
  }
  return right ? 0 : 1;
}
