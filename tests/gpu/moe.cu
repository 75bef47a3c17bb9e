// Mixture of experts on GPUs, compared with the host's engine. Ranks are threads. tests/gpu/test_moe.py
// compiles and runs it.
//   moe CASE RANKS [SMS]  exit status 0: all is as expected; 1: not, as stderr says; 77: too few GPUs here
#include "moe_faults.cuh"
#include "moe_late.cuh"
#include "moe_streams.cuh"

namespace {

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

// The longest rows have several segments of a warp, the last of which ends within a block.
void scaled(Rank& rank) {
  for (const MoeLayout layout : kLayouts)
    for (const DType dtype : kDTypes)
      for (const MoeScales scales : {MoeScales::e4m3_128, MoeScales::mx})
        for (const std::size_t hidden : {5264, 512, 264, 131})
          run(rank,
              {.layout = layout,
               .dtype = dtype,
               .hidden = hidden,
               .max_tokens = 33,
               .options = {.alignment = layout == MoeLayout::expert_major ? 16 : 1, .scales = scales},
               .more = std::vector<std::size_t>(hidden > 512 ? 1 : 0, 20)},
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

void handles(Rank& rank) {
  handles(rank, {});
  handles(rank, {.hidden = 5264, .options = {.scales = MoeScales::e4m3_128}, .weights = false});
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

// Two at once, of which the one that was made first has kernels that need more shared memory.
void two(Rank& rank) {
  for (const MoeLayout layout : kLayouts) {
    const Case many{.layout = layout, .experts_of_rank = 64, .top_k = 8, .max_tokens = 301, .few = 9};
    const Case one{.layout = layout};
    Pair first(rank, many), second(rank, one);
    for (unsigned round = 0; round < 4; ++round) {
      first.round(round);
      second.round(round);
    }
    first.end();
    second.end();
  }
}

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

const std::map<std::string, void (*)(Rank&)>& cases() {
  static const std::map<std::string, void (*)(Rank&)> all{{"layouts", layouts},
                                                          {"routes", routes},
                                                          {"scaled", scaled},
                                                          {"payloads", payloads},
                                                          {"dropped", dropped},
                                                          {"widths", [](Rank& rank) { widths(rank, {}); }},
                                                          {"copies", copies},
                                                          {"handles", [](Rank& rank) { handles(rank); }},
                                                          {"out", [](Rank& rank) { out(rank); }},
                                                          {"pressure", pressure},
                                                          {"graphs", [](Rank& rank) { graphs(rank); }},
                                                          {"few", few},
                                                          {"late", [](Rank& rank) { late(rank); }},
                                                          {"steps", [](Rank& rank) { steps(rank, {}); }},
                                                          {"index", index},
                                                          {"rows", rows},
                                                          {"overflow", overflow},
                                                          {"two", two},
                                                          {"differs", differs}};
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4 || !cases().contains(argv[1])) return 2;
  const int ranks = std::atoi(argv[2]), gpus = device_count();
  const bool shared = gpus < ranks;
  const int most_sms = argc == 4 ? std::atoi(argv[3]) : shared ? 128 / ranks : 0;
  if (gpus == 0 || (shared && !std::getenv("UNISONO_SHARE_DEVICE"))) return 77;
  const auto bootstraps = thread_bootstraps(ranks, std::chrono::seconds(60));
  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < bootstraps.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        const int device = shared ? 0 : static_cast<int>(r);
        check(cudaSetDevice(device), "a device");
        Rank rank(bootstraps[r], {.timeout_s = 20, .device = device, .max_sms = most_sms});
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
