// The plan's table: its choices, the replacement of its entries, and its refusals.
#include "core/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "cuda/layout.hpp"
#include "host/host_thread.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

using enum Algorithm;
constexpr std::size_t kRest = std::numeric_limits<std::size_t>::max();

std::vector<Collective> collectives() {
  std::vector<Collective> all;
  for (int i = 0; i < kCollectives; ++i)
    if (!Plan::algorithms(static_cast<Collective>(i), Level::host).empty())
      all.push_back(static_cast<Collective>(i));
  return all;
}

// The collectives whose rows on the host name forms over packets, over chunks and on reached memory. send and
// recv go by send_recv's rows. A fused norm has no form over packets.
std::vector<Collective> with_every_form() {
  using enum Collective;
  std::vector<Collective> some = collectives();
  std::erase_if(some,
                [](Collective one) { return one == send || one == recv || one == all_reduce_rms_norm; });
  return some;
}

// The host's plans of ranks that reach each other's memory, or for which the kernel copies fast.
TEST(Plan, LargeFusedNormsGoDirectWhereThatIsFaster) {
  for (const int ranks : {1, 2, 5})
    for (const int ranks_a_core : {1, 4})
      for (const bool symmetric : {false, true})
        for (const bool kernel_fast : {false, true}) {
          const Plan plan =
              Plan::of_host({.ranks = ranks, .ranks_a_core = ranks_a_core, .kernel_fast = kernel_fast});
          const auto chosen = [&](std::size_t bytes) {
            return plan.choose(Collective::all_reduce_rms_norm, bytes, symmetric);
          };
          EXPECT_EQ(chosen(8), ranks_a_core > 1 ? Algorithm::one_shot : Algorithm::two_shot);
          const bool direct = symmetric || (kernel_fast && ranks == 2 && ranks_a_core == 1);
          EXPECT_EQ(chosen(1 << 30), direct ? Algorithm::two_shot_direct : Algorithm::two_shot);
        }
}

TEST(Plan, ChoosesAnAlgorithmOfTheCollective) {
  for (const int ranks : {1, 2, 3, 8, 64, 1024})
    for (int kind = 0; kind < 8; ++kind)
      for (const bool symmetric : {false, true})
        for (const Collective collective : collectives()) {
          const auto known = Plan::algorithms(collective, Level::host);
          const Plan plan = Plan::of_host({.ranks = ranks,
                                           .ranks_a_core = (kind & 1) != 0 ? 4 : 1,
                                           .cached = (kind & 2) != 0,
                                           .one_process = (kind & 4) != 0});
          for (std::size_t bytes = 0; bytes < std::size_t{1} << 40; bytes = bytes * 3 + 1)
            EXPECT_NE(std::find(known.begin(), known.end(), plan.choose(collective, bytes, symmetric)),
                      known.end());
        }
}

TEST(Plan, ManyGpusHaveWhatRunsThere) {
  for (const int ranks : {9, 12, 72}) {
    const Plan plan = Plan::of_many_gpus(ranks);
    for (const Collective collective : collectives())
      for (const bool symmetric : {false, true})
        for (std::size_t bytes = 0; bytes < std::size_t{1} << 40; bytes = bytes * 3 + 1) {
          const Algorithm chosen = plan.choose(collective, bytes, symmetric);
          const bool listed = collective != Collective::batch_send_recv && !traits_of(collective).two_ended;
          EXPECT_TRUE(!listed || Plan::has(collective, chosen, Level::device)) << name_of(collective);
          EXPECT_TRUE(cuda::runs_on_many(chosen)) << name_of(collective) << " by " << name_of(chosen);
        }
  }
}

// Rings of the host lane have room for a chunk more than are under way, and stay within their memory.
TEST(Layout, RingsFitTheCacheOfACore) {
  constexpr std::size_t kChunk = 64 << 10, kMiB = std::size_t{1} << 20;
  for (const int ranks : {1, 2, 3, 5, 64})
    for (const std::size_t cache : {std::size_t{0}, kMiB / 2, kMiB, 64 * kMiB, ~std::size_t{0}}) {
      HostThread::Layout layout(ranks, kChunk, 100);
      const std::size_t bytes = layout.bytes;
      layout.fit_rings(cache);
      EXPECT_GE(layout.ring_bytes, (HostThread::kChunks + 1) * kChunk) << ranks << " ranks, " << cache;
      EXPECT_LE(layout.ring_bytes, layout.ring_room) << ranks << " ranks, " << cache;
      EXPECT_EQ(layout.bytes, bytes);  // the memory is taken before ranks know each other's caches
    }
  HostThread::Layout small(2, kChunk, 100), large(2, kChunk, 100);
  small.fit_rings(kMiB / 2);
  large.fit_rings(kMiB);
  EXPECT_EQ(small.ring_bytes, kMiB);
  EXPECT_EQ(large.ring_bytes, 2 * kMiB);
}

// Layouts of the CUDA lane's scratch: parts do not overlap, and do not grow with the ranks beyond bounds.
TEST(Layout, ManyRanksHaveNoRingsOfExchanges) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  const cuda::Layout few(8, 128, 32 << 10), many(72, 64, 7 << 10);
  EXPECT_GT(few.lines - few.packets, 0u);
  EXPECT_EQ(many.tokens, many.packets);
  EXPECT_LT(many.bytes, 160 * kMiB);
  EXPECT_LE(many.chunks + std::size_t{72} * 64 * cuda::kChunks * many.chunk_bytes, many.counters);
  EXPECT_LE(many.counters + std::size_t{72} * 64 * sizeof(cuda::Counters), many.counts);
}

TEST(Plan, TakesPacketsForSmallCallsAndDirectForLargeOnes) {
  const Plan plan = Plan::of_host({.ranks = 4});
  for (const Collective collective : with_every_form()) {
    EXPECT_TRUE(is_packets(plan.choose(collective, 8, false))) << name_of(collective);
    EXPECT_TRUE(is_direct(plan.choose(collective, 1 << 30, true))) << name_of(collective);
  }
}

TEST(Plan, PlainMemoryOfManyGoesThroughChunksThatStayInTheCache) {
  const Plan cached = Plan::of_host({.ranks = 5, .cached = true}), around = Plan::of_host({.ranks = 5});
  for (const Collective collective : with_every_form()) {
    EXPECT_FALSE(is_direct(cached.choose(collective, 1 << 17, false))) << name_of(collective);
    EXPECT_TRUE(is_direct(around.choose(collective, 1 << 18, false))) << name_of(collective);
    EXPECT_EQ(cached.choose(collective, 1 << 17, true), around.choose(collective, 1 << 17, true));
    EXPECT_TRUE(is_direct(cached.choose(collective, 1 << 30, false)));
  }
}

// Returns up to how many KiB, a power of two, a call on plain memory is not direct.
std::size_t border_kib(const Plan& plan, Collective collective) {
  std::size_t kib = 1;
  while (!is_direct(plan.choose(collective, 2 * kib * 1024, false))) kib *= 2;
  return kib;
}

// For all_reduce, reduce, reduce_scatter, broadcast, all_gather, all_to_all, all_to_all_v, gather, scatter
// and send_recv.
std::vector<std::size_t> borders_kib(const Plan::Host& host) {
  using enum Collective;
  std::vector<std::size_t> borders;
  for (const Collective collective : {all_reduce, reduce, reduce_scatter, broadcast, all_gather, all_to_all,
                                      all_to_all_v, gather, scatter, send_recv})
    borders.push_back(border_kib(Plan::of_host(host), collective));
  return borders;
}

TEST(Plan, KernelCopiesDecideWhereTwoRanksGoDirect) {
  using Borders = std::vector<std::size_t>;
  const Borders slow{64, 64, 64, 64, 64, 64, 64, 64, 64, 16};
  const Borders fast{16, 16, 16, 16, 16, 16, 16, 16, 16, 8};
  for (const bool through : {false, true}) {
    EXPECT_EQ(borders_kib({.ranks = 2, .cached = through}), slow);
    EXPECT_EQ(borders_kib({.ranks = 2, .cached = through, .kernel_fast = true}), fast);
  }
}

TEST(Plan, OnePacketAMessageWhereLinesAreLetGoOf) {
  using enum Algorithm;
  constexpr std::size_t packet = Plan::Host::kPacket;
  for (const int ranks : {2, 3, 8}) {
    const Plan plan = Plan::of_host({.ranks = ranks, .lets_go = true});
    const std::size_t all = packet * static_cast<std::size_t>(ranks);
    EXPECT_EQ(plan.choose(Collective::all_reduce, packet, false), one_shot_packets);
    EXPECT_EQ(plan.choose(Collective::all_reduce, packet + 1, false), one_shot);
    EXPECT_EQ(plan.choose(Collective::broadcast, packet + 1, true), push);
    EXPECT_EQ(plan.choose(Collective::all_gather, all, true), push_packets);
    EXPECT_EQ(plan.choose(Collective::all_gather, all + 1, true), push);
    const Plan lets_go = Plan::of_host({.ranks = ranks, .ranks_a_core = 2, .lets_go = true});
    const Plan keeps = Plan::of_host({.ranks = ranks, .ranks_a_core = 2});
    for (const Collective collective : collectives())
      for (std::size_t bytes = 1; bytes < std::size_t{1} << 30; bytes *= 2)
        EXPECT_EQ(lets_go.choose(collective, bytes, false), keeps.choose(collective, bytes, false));
  }
}

TEST(Plan, KernelCopiesDecideWhereRanksThatTakeTurnsGoDirect) {
  using Borders = std::vector<std::size_t>;
  const auto borders = [](int a_core, bool fast) {
    return borders_kib({.ranks = 2 * a_core, .ranks_a_core = a_core, .cached = true, .kernel_fast = fast});
  };
  EXPECT_EQ(borders(2, false), (Borders{256, 1024, 1024, 1024, 512, 512, 512, 1024, 1024, 128}));
  EXPECT_EQ(borders(2, true), (Borders{128, 512, 512, 512, 512, 512, 512, 512, 512, 64}));
  EXPECT_EQ(borders(4, false), (Borders{256, 256, 256, 256, 128, 128, 128, 256, 256, 128}));
  EXPECT_EQ(borders(4, true), (Borders{64, 128, 128, 128, 128, 128, 128, 256, 256, 64}));
}

TEST(Plan, KernelCopiesDecideNothingElse) {
  const std::vector<std::size_t> cached{512, 512, 512, 512, 512, 512, 512, 512, 512, 128};
  for (const bool fast : {false, true})
    EXPECT_EQ(borders_kib({.ranks = 4, .cached = true, .kernel_fast = fast}), cached);
  for (const int ranks : {2, 3, 8})
    for (const bool cached : {false, true})
      for (const int ranks_a_core : {1, 2, 4}) {
        const Plan slow = Plan::of_host({ranks, ranks_a_core, cached, false, false});
        const Plan fast = Plan::of_host({ranks, ranks_a_core, cached, false, true});
        for (const Collective collective : collectives())
          for (std::size_t bytes = 1; bytes < std::size_t{1} << 30; bytes *= 2)
            for (const bool symmetric : {false, true})
              if (symmetric || (ranks > 2 && ranks_a_core == 1)) {
                EXPECT_EQ(slow.choose(collective, bytes, symmetric),
                          fast.choose(collective, bytes, symmetric));
              }
      }
}

TEST(Plan, PlainMemoryOfOneProcessIsReachedLikeSymmetricMemory) {
  for (const int ranks_a_core : {1, 2, 4}) {
    const Plan plan =
        Plan::of_host({.ranks = 3, .ranks_a_core = ranks_a_core, .cached = true, .one_process = true});
    for (const Collective collective : collectives())
      for (std::size_t bytes = 1; bytes < std::size_t{1} << 30; bytes *= 2)
        EXPECT_EQ(plan.choose(collective, bytes, false), plan.choose(collective, bytes, true));
  }
}

TEST(Plan, AnEntryHoldsUpToItsBytes) {
  Plan plan = Plan::of_host({.ranks = 2});
  plan.set({{Collective::reduce, false, 100, push_packets}, {Collective::reduce, false, 200, push}});
  EXPECT_EQ(plan.choose(Collective::reduce, 0, false), push_packets);
  EXPECT_EQ(plan.choose(Collective::reduce, 100, false), push_packets);
  EXPECT_EQ(plan.choose(Collective::reduce, 101, false), push);
  EXPECT_EQ(plan.choose(Collective::reduce, 200, false), push);
}

TEST(Plan, BeyondTheLastEntryIsTheStagedProgram) {
  Plan plan = Plan::of_host({.ranks = 2});
  plan.set({{Collective::reduce, false, 100, push_packets}, {Collective::all_reduce, false, 100, one_shot}});
  EXPECT_EQ(plan.choose(Collective::reduce, 101, false), push);
  EXPECT_EQ(plan.choose(Collective::all_reduce, kRest, false), two_shot);
}

TEST(Plan, EntriesMayComeInAnyOrder) {
  Plan plan = Plan::of_host({.ranks = 2});
  plan.set({{Collective::gather, false, kRest, direct},
            {Collective::gather, false, 10, push_packets},
            {Collective::gather, false, 50, push}});
  EXPECT_EQ(plan.choose(Collective::gather, 10, false), push_packets);
  EXPECT_EQ(plan.choose(Collective::gather, 11, false), push);
  EXPECT_EQ(plan.choose(Collective::gather, 51, false), direct);
}

TEST(Plan, ReplacesOnlyWhatTheTableHas) {
  const Plan::Host host{.ranks = 16, .one_process = true};  // a plan whose ranges do not rise
  const Plan before = Plan::of_host(host);
  Plan plan = Plan::of_host(host);
  plan.set({{Collective::scatter, true, kRest, push}});
  EXPECT_EQ(plan.choose(Collective::scatter, 1, true), push);
  for (std::size_t bytes = 1; bytes <= std::size_t{1} << 20; bytes *= 2)
    for (const Collective collective : collectives())
      for (const bool symmetric : {false, true}) {
        if (collective == Collective::scatter && symmetric) continue;
        EXPECT_EQ(plan.choose(collective, bytes, symmetric), before.choose(collective, bytes, symmetric))
            << name_of(collective) << " of " << bytes;
      }
  plan.set({{Collective::scatter, true, 10, push_packets}});
  EXPECT_EQ(plan.choose(Collective::scatter, 10, true), push_packets);
}

TEST(Plan, RefusesAnAlgorithmOfAnotherCollective) {
  Plan plan = Plan::of_host({.ranks = 2});
  EXPECT_THROW(plan.set({{Collective::reduce, false, 100, two_shot}}), UsageError);
  EXPECT_THROW(plan.set({{Collective::all_reduce, false, 100, push}}), UsageError);
  EXPECT_THROW(plan.set({{Collective::barrier, false, 100, push}}), UsageError);
  EXPECT_THROW(plan.set({{Collective::reduce, false, 100, automatic}}), UsageError);
  EXPECT_EQ(plan.choose(Collective::reduce, 8, false), push_packets);  // as before
}

// A plan of GPUs has an algorithm of every collective. Over NVLink it may take lines, and direct algorithms
// if buffers are reached or two ranks tell each other whether they are. Without NVLink it takes neither.
void expect_an_algorithm_that_reaches(const Plan& plan, bool nvlink) {
  for (const Collective collective : collectives()) {
    const auto known = Plan::algorithms(collective, Level::device);
    for (const bool symmetric : {false, true})
      for (std::size_t bytes = 1; bytes < std::size_t{1} << 40; bytes *= 3) {
        const Algorithm chosen = plan.choose(collective, bytes, symmetric);
        EXPECT_NE(std::find(known.begin(), known.end(), chosen), known.end()) << name_of(collective);
        const bool reached =
            symmetric || collective == Collective::send_recv || traits_of(collective).by_parts();
        EXPECT_TRUE((reached && nvlink) || !is_direct(chosen)) << name_of(collective);
        EXPECT_TRUE(nvlink || !is_lines(chosen)) << name_of(collective);
      }
  }
}

TEST(Plan, OfGpusKnowsEveryCollective) {
  for (int ranks = 2; ranks <= 8; ++ranks) expect_an_algorithm_that_reaches(Plan::of_gpu("", ranks), true);
}

// No rank of a send_recv or an all_to_all_v on GPUs knows whether the others' buffers are symmetric.
TEST(Plan, OfGpusHasOneEntryForAllMemoryOfPairsAndParts) {
  Plan plan = Plan::of_gpu("", 2);
  for (const Collective collective : {Collective::send_recv, Collective::all_to_all_v}) {
    plan.set({{collective, false, kRest, push}, {collective, true, kRest, push_packets}});
    for (const bool symmetric : {false, true}) EXPECT_EQ(plan.choose(collective, 1000, symmetric), push);
  }
}

// Messages of these collectives go directly by their own sizes, those of a batch as a send_recv does: those
// that do in one kernel, the others in another.
TEST(Plan, OfGpusGoesByTheSizeOfEachMessage) {
  constexpr Shape kStaged{8, 64, 960}, kSmall{32, 128, 4096}, kDirect{128, 256, 32768};
  Plan plan = Plan::of_gpu("", 2);
  plan.set({{Collective::all_to_all_v, false, 500, push_packets},
            {Collective::all_to_all_v, false, 1000, push_ll128, kStaged},
            {Collective::all_to_all_v, false, kRest, direct, kDirect},
            {Collective::send_recv, false, 1000, push},
            {Collective::send_recv, false, kRest, direct, kSmall}});
  for (const Collective collective : {Collective::batch_send_recv, Collective::all_to_all_v}) {
    for (const bool tells : {false, true})
      for (const std::size_t bytes : {0, 500, 501, 1000})
        EXPECT_EQ(plan.choose(collective, bytes, tells), push_ll128);
    EXPECT_EQ(plan.choose(collective, 1001, true), direct);
    EXPECT_EQ(plan.choose(collective, 1001, false), push_ll128);  // no receiver can tell an address
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{1500}, kRest}) {
      EXPECT_EQ(plan.shape(collective, bytes, false, push_ll128).piece_bytes, kStaged.piece_bytes);
      EXPECT_EQ(plan.shape(collective, bytes, false, direct).piece_bytes, kDirect.piece_bytes);
      EXPECT_EQ(plan.shape(collective, bytes, false, push_packets).piece_bytes, 0u);
    }
  }
  plan.set({{Collective::all_to_all_v, false, kRest, push_ll128, kStaged}});
  EXPECT_EQ(plan.choose(Collective::all_to_all_v, kRest, true), push_ll128);
  EXPECT_EQ(plan.choose(Collective::batch_send_recv, kRest, true), direct);
  EXPECT_EQ(plan.shape(Collective::batch_send_recv, kRest, false, direct).piece_bytes, kSmall.piece_bytes);
  plan.set({{Collective::all_to_all_v, false, kRest, direct, kDirect}});
  EXPECT_EQ(plan.choose(Collective::all_to_all_v, 1, true), direct);
  EXPECT_EQ(plan.choose(Collective::all_to_all_v, 1, false), push);
}

// Among more than two GPUs short and long parts would wait for each other. A batch may well have one message.
TEST(Plan, OfGpusSendsPartsDirectlyBetweenTwo) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    const Plan plan = Plan::of_gpu("", ranks);
    EXPECT_EQ(plan.choose(Collective::all_to_all_v, kRest, true), ranks == 2 ? direct : push_ll128);
    EXPECT_EQ(plan.choose(Collective::batch_send_recv, kRest, true), direct);
  }
}

TEST(Plan, OfGpusOverPcieReachesNowhereAndHasNoLines) {
  for (int ranks = 1; ranks <= 8; ++ranks)
    expect_an_algorithm_that_reaches(Plan::of_gpu_over_pcie(ranks), false);
}

TEST(Plan, HasTablesOnlyOfCardsByTheirFullNames) {
  EXPECT_TRUE(Plan::has_table("NVIDIA H200"));
  for (const char* card : {"", "NVIDIA H200 NVL", "NVIDIA L40S"}) EXPECT_FALSE(Plan::has_table(card));
}

TEST(Plan, OfGpusGoesByCardAndRanks) {
  auto choices = [](std::string_view card, int ranks) {
    std::vector<Algorithm> chosen;
    const Plan plan = Plan::of_gpu(card, ranks);
    for (const Collective collective : collectives())
      for (std::size_t bytes = 1; bytes < std::size_t{1} << 34; bytes *= 2)
        chosen.push_back(plan.choose(collective, bytes, true));
    return chosen;
  };
  EXPECT_NE(choices("NVIDIA H200", 2), choices("NVIDIA H200", 4));
  EXPECT_EQ(choices("an unknown card", 2), choices("NVIDIA H200", 2));
}

TEST(Plan, OneStepPaysForAsManyBytesToAllPeers) {
  // the most bytes in one step; 3 and 8 ranks have the table of 4
  auto border = [](Collective collective, int ranks) {
    const Plan plan = Plan::of_gpu("NVIDIA H200", ranks);
    std::size_t bytes = 1;
    while (form_of(plan.choose(collective, bytes, false)) == Algorithm::one_shot) ++bytes;
    return bytes - 1;
  };
  for (const Collective collective : {Collective::all_reduce, Collective::all_reduce_rms_norm}) {
    const std::size_t of_four = border(collective, 4);
    EXPECT_EQ(border(collective, 3), of_four * 3 / 2);
    EXPECT_EQ(border(collective, 8), of_four * 3 / 7);
  }
}

TEST(Plan, AShapeIsThatOfItsAlgorithm) {
  Plan plan = Plan::of_gpu("", 2);
  plan.set({{Collective::reduce, true, 100, push_packets, {4, 64, 512}},
            {Collective::reduce, true, kRest, direct}});
  EXPECT_EQ(plan.shape(Collective::reduce, 100, true, push_packets).blocks, 4);
  EXPECT_EQ(plan.shape(Collective::reduce, 100, true, push_packets).piece_bytes, 512u);
  EXPECT_EQ(plan.shape(Collective::reduce, 100, true, push).blocks, 0);  // asked for by name
  EXPECT_EQ(plan.shape(Collective::reduce, 101, true, direct).threads, 0);
}

TEST(Plan, RefusesAShapeThatNoKernelHas) {
  Plan plan = Plan::of_gpu("", 2);
  for (const Shape& shape : {Shape{-1, 0, 0}, Shape{1, 33, 0}, Shape{1, -32, 0}, Shape{1, 1024, 0}})
    EXPECT_THROW(plan.set({{Collective::reduce, true, 100, push, shape}}), UsageError);
  EXPECT_EQ(plan.shape(Collective::reduce, 100, true, push).threads, 0);
}

TEST(Plan, StagedProgramsTakeAnyPointer) {
  for (const Collective collective : collectives()) {
    const auto known = Plan::algorithms(collective, Level::host);
    const Algorithm staged = Plan::staged(collective);
    EXPECT_NE(std::find(known.begin(), known.end(), staged), known.end());
    EXPECT_FALSE(is_direct(staged));
  }
}

TEST(Plan, LongSumsOfTwoRanksAreMadeOnceOverChunksToo) {
  using enum Collective;
  constexpr std::size_t most = std::size_t{64} << 10;  // of one step
  EXPECT_EQ(Plan::staged(all_reduce, 2, most), Algorithm::one_shot);
  EXPECT_EQ(Plan::staged(all_reduce, 2, most + 1), Algorithm::two_shot);
  EXPECT_EQ(Plan::staged(all_reduce, 3, most), Algorithm::two_shot);
  EXPECT_EQ(Plan::staged(broadcast, 2, most + 1), Algorithm::push);
}

TEST(Names, AreDistinctAndReadBack) {
  std::set<std::string_view> names;
  for (int i = 0; i < kAlgorithms; ++i) {
    const auto algorithm = static_cast<Algorithm>(i);
    names.insert(name_of(algorithm));
    EXPECT_EQ(from_name<Algorithm>(name_of(algorithm), kAlgorithms), algorithm);
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kAlgorithms));
  for (int i = 0; i < kCollectives; ++i)
    EXPECT_EQ(from_name<Collective>(name_of(static_cast<Collective>(i)), kCollectives),
              static_cast<Collective>(i));
  EXPECT_EQ(from_name<DType>("f16", kDTypes), DType::f16);
  EXPECT_EQ(from_name<Op>("median", kOps), std::nullopt);
}

}  // namespace
}  // namespace unisono
