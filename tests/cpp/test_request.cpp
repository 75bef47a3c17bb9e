// Calls before they run: sizes, roots, peers, overlaps, and the comparison with another rank's call.
#include "core/request.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "unisono/error.hpp"

namespace unisono {
namespace {

constexpr int kRanks = 4, kMe = 2;
constexpr std::size_t kCount = 10, kBlock = kCount * sizeof(float);
constexpr Collective kRegular[] = {Collective::all_reduce, Collective::reduce,    Collective::broadcast,
                                   Collective::all_gather, Collective::gather,    Collective::reduce_scatter,
                                   Collective::scatter,    Collective::all_to_all};

struct Sizes {
  std::size_t in, out;        // bytes of both buffers, if a rank has both
  std::size_t at_in, at_out;  // in place: offset in bytes of the smaller within the larger
};
Sizes sizes_of(Collective collective) {
  const std::size_t all = kRanks * kBlock, own = kMe * kBlock;
  switch (collective) {
    case Collective::all_gather:
    case Collective::gather: return {kBlock, all, own, 0};
    case Collective::reduce_scatter:
    case Collective::scatter: return {all, kBlock, 0, own};
    case Collective::all_to_all: return {all, all, 0, 0};
    default: return {kBlock, kBlock, 0, 0};
  }
}

// Returns the request as a communicator takes it: with the algorithm that the call names.
Request named(Request request) {
  if (!request.call->algorithm.empty())
    request.name_algorithm(Plan::algorithms(request.collective, level_of(request.call->memory)));
  request.check_wire();
  request.check_factor();
  return request;
}

class Requests : public testing::TestWithParam<Collective> {
 protected:
  const Sizes sizes = sizes_of(GetParam());
  std::vector<std::byte> memory = std::vector<std::byte>(4096);

  Call call(std::size_t in, std::size_t out, int root = kMe) {
    return {.in = memory.data() + in, .out = memory.data() + out, .count = kCount, .root = root};
  }
  Request make(const Call& call) const { return named({GetParam(), call, kMe, kRanks}); }
};
INSTANTIATE_TEST_SUITE_P(All, Requests, testing::ValuesIn(kRegular),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(Requests, KnowTheirSizes) {
  const Call c = call(0, 2048);
  const Request request = make(c);
  EXPECT_EQ(request.in_bytes, sizes.in);
  EXPECT_EQ(request.out_bytes, sizes.out);
  EXPECT_EQ(request.bytes(), std::max(sizes.in, sizes.out));
  EXPECT_EQ(request.args.block, kBlock);
}

TEST_P(Requests, NeedElementsThatAGpuCanLoad) {
  const auto c = GetParam();
  const bool combines =
      c == Collective::all_reduce || c == Collective::reduce || c == Collective::reduce_scatter;
  for (const auto& [in, out] : {std::pair(2, 2048), std::pair(0, 2049)}) {
    Call odd = call(static_cast<std::size_t>(in), static_cast<std::size_t>(out));
    EXPECT_NO_THROW(make(odd));
    odd.memory = Memory::device;
    if (combines) EXPECT_THROW(make(odd), UsageError);
    else EXPECT_NO_THROW(make(odd));
  }
}

TEST_P(Requests, MayHaveBuffersSideBySide) {
  EXPECT_NO_THROW(make(call(0, sizes.in)));
  EXPECT_NO_THROW(make(call(sizes.out, 0)));
}

TEST_P(Requests, MayBeInPlace) { EXPECT_NO_THROW(make(call(1000 + sizes.at_in, 1000 + sizes.at_out))); }

TEST_P(Requests, MayNotOverlapOtherwise) {
  for (const std::size_t shift : {std::size_t{4}, kBlock / 2})
    for (const bool before : {false, true}) {
      const std::size_t in = 1000 + sizes.at_in + (before ? 0 : shift),
                        out = 1000 + sizes.at_out + (before ? shift : 0);
      EXPECT_THROW(make(call(in, out)), UsageError) << shift << before;
    }
  EXPECT_THROW(make(call(0, sizes.in - 1)), UsageError);
  EXPECT_THROW(make(call(sizes.out - 1, 0)), UsageError);
}

TEST_P(Requests, NeedTheirBuffers) {
  auto text = [&](const Call& wrong) -> std::string {
    try {
      make(wrong);
    } catch (const UsageError& error) { return error.what(); }
    return "no error";
  };
  Call c = call(0, 2048);
  c.in = nullptr;
  EXPECT_NE(text(c).find("needs an input"), std::string::npos) << text(c);
  c = call(0, 2048);
  c.out = nullptr;
  EXPECT_NE(text(c).find("needs an output"), std::string::npos) << text(c);
  c.in = nullptr, c.count = 0;
  EXPECT_NO_THROW(make(c));
}

TEST_P(Requests, RefuseCountsBeyondMemory) {
  Call c = call(0, 2048);
  for (const std::size_t count :
       {std::numeric_limits<std::size_t>::max(), std::numeric_limits<std::size_t>::max() / 4 + 1,
        std::numeric_limits<std::size_t>::max() / 15}) {
    c.count = count;
    EXPECT_THROW(make(c), UsageError) << count;
  }
}

TEST_P(Requests, RefuseUnknownAlgorithms) {
  Call c = call(0, 2048);
  c.algorithm = "quantum";
  EXPECT_THROW(make(c), UsageError);
  for (const Algorithm algorithm : Plan::algorithms(GetParam(), Level::host)) {
    c.algorithm = name_of(algorithm);
    EXPECT_EQ(make(c).algorithm, algorithm);
  }
}

// Peers reach only bytes within the rank's buffers.
TEST_P(Requests, ReachNoFurtherThanTheBuffers) {
  const Call c = call(0, 2048);
  const Request request = make(c);
  EXPECT_LE(request.reached_by_peers(kMe).in, request.in_bytes);
  EXPECT_LE(request.reached_by_peers(kMe).out, request.out_bytes);
}

TEST(QuantisedRequests, AreSumsAndAveragesOfFloatsByTwoShot) {
  std::vector<std::byte> memory(4096);
  auto made = [&](Collective collective, DType dtype, Op op, std::string_view algorithm) {
    const Call call{.in = memory.data(),
                    .out = memory.data() + 2048,
                    .count = 4,
                    .dtype = dtype,
                    .op = op,
                    .algorithm = algorithm,
                    .wire = Wire::int8};
    return named({collective, call, 1, 2}).algorithm;
  };
  for (int d = 0; d < kDTypes; ++d)
    for (int o = 0; o < kOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<Op>(o);
      const bool good = (dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16) &&
                        (op == Op::sum || op == Op::avg);
      if (good) {
        EXPECT_EQ(made(Collective::all_reduce, dtype, op, ""), Algorithm::two_shot);
      } else {
        EXPECT_THROW(made(Collective::all_reduce, dtype, op, ""), UsageError);
      }
    }
  EXPECT_THROW(made(Collective::all_reduce, DType::f32, Op::sum, "two_shot_direct"), UsageError);
  EXPECT_THROW(made(Collective::reduce, DType::f32, Op::sum, ""), UsageError);
  EXPECT_THROW(made(Collective::all_gather, DType::f32, Op::sum, ""), UsageError);
}

TEST(BitwiseRequests, AreOfIntegersInHostMemory) {
  std::vector<std::byte> memory(4096);
  for (const Op op : {Op::band, Op::bor, Op::bxor})
    for (int d = 0; d < kDTypes; ++d) {
      Call call{.in = memory.data(),
                .out = memory.data() + 2048,
                .count = 4,
                .dtype = static_cast<DType>(d),
                .op = op};
      const bool good = d >= static_cast<int>(DType::i8) && d <= static_cast<int>(DType::i64);
      for (const Collective collective :
           {Collective::all_reduce, Collective::reduce, Collective::reduce_scatter}) {
        call.memory = Memory::host;
        if (good) {
          EXPECT_NO_THROW(Request(collective, call, kMe, kRanks));
        } else {
          EXPECT_THROW(Request(collective, call, kMe, kRanks), UsageError);
        }
        call.memory = Memory::device;
        EXPECT_THROW(Request(collective, call, kMe, kRanks), UsageError);
      }
      EXPECT_NO_THROW(Request(Collective::all_gather, call, kMe, kRanks)) << "moves have no op";
    }
}

TEST(ScaledRequests, AreSumsOfFloatsInHostMemory) {
  std::vector<std::byte> memory(4096);
  auto text = [&](Collective collective, DType dtype, Op op, Memory where, double factor) -> std::string {
    const Call call{.in = memory.data(),
                    .out = memory.data() + 2048,
                    .count = 4,
                    .dtype = dtype,
                    .op = op,
                    .memory = where,
                    .factor = factor};
    try {
      named({collective, call, kMe, kRanks});
    } catch (const UsageError& error) { return error.what(); }
    return "";
  };
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  using enum Collective;
  for (const Collective collective : {all_reduce, reduce, reduce_scatter})
    for (int d = 0; d < kDTypes; ++d)
      for (int o = 0; o < kOps; ++o)
        for (const Memory where : {Memory::host, Memory::device}) {
          const auto dtype = static_cast<DType>(d);
          const auto op = static_cast<Op>(o);
          if (!has_op(dtype, op, where)) continue;
          const bool is_float = d <= static_cast<int>(DType::bf16);  // f32, f64, f16, bf16
          const bool good = is_float && op == Op::sum && where == Memory::host;
          EXPECT_EQ(takes_factor(dtype, op, where), good);
          for (const double factor : {0.5, 0.0, -1.0, inf, nan})
            EXPECT_EQ(text(collective, dtype, op, where, factor).empty(), good) << d << ' ' << o;
          EXPECT_EQ(text(collective, dtype, op, where, 1), "");
        }
  EXPECT_EQ(text(all_reduce, DType::f32, Op::max, Memory::host, 2),
            "factor is for sum, not max: leave it out, or give op sum.");
  EXPECT_EQ(text(all_reduce, DType::i32, Op::sum, Memory::host, 2),
            "factor is for f32, f64, f16 and bf16, not i32: leave it out, or give an array of those.");
  EXPECT_EQ(text(reduce, DType::f32, Op::sum, Memory::device, 2),
            "factor is for host memory: leave it out, and scale the array on the GPU before reduce.");
  for (const Collective collective : {broadcast, all_gather, gather, scatter, all_to_all})
    EXPECT_EQ(text(collective, DType::f32, Op::sum, Memory::host, 2),
              std::string(name_of(collective)) +
                  " has no sum: leave factor out, or scale the array before the call.");
  const Call tagged{.in = memory.data(), .count = 4, .factor = 2};
  EXPECT_THROW(Message(send, tagged, kRanks, 0, 1), UsageError);
}

TEST(RootedRequests, NeedOnlyTheirOwnBuffersBesideTheRoot) {
  std::vector<std::byte> memory(4096);
  const Call in{.in = memory.data(), .count = kCount, .root = 0},
      out{.out = memory.data(), .count = kCount, .root = 0};
  EXPECT_EQ(Request(Collective::reduce, in, kMe, kRanks).out_bytes, 0u);
  EXPECT_EQ(Request(Collective::gather, in, kMe, kRanks).out_bytes, 0u);
  EXPECT_EQ(Request(Collective::broadcast, out, kMe, kRanks).in_bytes, 0u);
  EXPECT_EQ(Request(Collective::scatter, out, kMe, kRanks).in_bytes, 0u);
  EXPECT_EQ(Request(Collective::reduce, in, kMe, kRanks).written_bytes(), kBlock);
  EXPECT_EQ(Request(Collective::gather, in, kMe, kRanks).written_bytes(), kBlock);
  EXPECT_EQ(Request(Collective::scatter, out, kMe, kRanks).written_bytes(), kBlock);
  try {  // the missing buffer is the output; there is no input either, but none is needed
    Request(Collective::scatter, {.count = kCount, .root = 0}, kMe, kRanks);
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "scatter needs an output buffer on this rank.");
  }
}

TEST(RootedRequests, NeedARootThatIsARank) {
  std::vector<std::byte> memory(4096);
  for (const Collective collective :
       {Collective::reduce, Collective::broadcast, Collective::gather, Collective::scatter})
    for (const int root : {-1, kRanks, 1 << 20}) {
      const Call call{.in = memory.data(), .out = memory.data() + 2048, .count = kCount, .root = root};
      EXPECT_THROW(Request(collective, call, kMe, kRanks), UsageError) << name_of(collective) << root;
    }
}

class PartRequests : public testing::Test {
 protected:
  using Counts = std::vector<std::size_t>;
  std::vector<std::byte> memory = std::vector<std::byte>(4096);
  Call call{.in = memory.data(), .out = memory.data() + 2048};
};

TEST_F(PartRequests, PackTheirPartsInRankOrder) {
  const Counts sends{1, 2, 3, 0}, receives{4, 0, 3, 1};
  const Request request(call, kMe, kRanks, sends, receives);
  EXPECT_EQ(request.in_bytes, 24u);
  EXPECT_EQ(request.out_bytes, 32u);
  EXPECT_EQ(request.bytes(), 32u);
  EXPECT_EQ(request.sends[2].at, memory.data() + 12);
  EXPECT_EQ(request.receives[3].at, memory.data() + 2048 + 28);
}

TEST_F(PartRequests, MarkEachMessageByItsBytes) {
  const Counts counts{1, 2, 3, 0};
  const Request request(call, kMe, kRanks, counts, counts);
  EXPECT_EQ(request.mark(8), Request(call, kMe, kRanks, counts, counts).mark(8));
  EXPECT_NE(request.mark(8), request.mark(12));
  EXPECT_NE(request.mark(0), request.mark(8));
}

TEST_F(PartRequests, OfABatchLieWhereTheyAre) {
  const std::vector<Communicator::Outgoing> sends{{memory.data(), 8, 1}, {memory.data() + 8, 0, 3}};
  const std::vector<Communicator::Incoming> receives{{memory.data() + 512, 100, 0}};
  const Request request(call, kMe, kRanks, sends, receives);
  EXPECT_EQ(request.collective, Collective::batch_send_recv);
  EXPECT_EQ(request.bytes(), 100u);
  EXPECT_EQ(request.sends[1].at, memory.data());
  EXPECT_EQ(request.sends[1].bytes, 8u);
  EXPECT_EQ(request.sends[3].at, memory.data() + 8);  // empty, but a message
  EXPECT_EQ(request.sends[0].at, nullptr);
  EXPECT_EQ(request.receives[0].bytes, 100u);
}

TEST_F(PartRequests, OfABatchAreRefused) {
  using Sends = std::vector<Communicator::Outgoing>;
  using Receives = std::vector<Communicator::Incoming>;
  std::byte* const at = memory.data();
  auto refused = [&](const Sends& sends, const Receives& receives) {
    EXPECT_THROW(Request(call, kMe, kRanks, sends, receives), UsageError);
  };
  refused({{at, 8, kRanks}}, {});
  refused({}, {{at, 8, -1}});
  refused({{at, 8, 1}, {at, 8, 1}}, {});
  refused({{nullptr, 8, 1}}, {});
  refused({{at, 8, kMe}}, {});
  refused({{at, 0, kMe}}, {});
  refused({{at, 8, kMe}}, {{at + 64, 9, kMe}});
  refused({{at, 8, 1}}, {{at + 7, 8, 1}});    // overlap
  refused({}, {{at, 8, 0}, {at + 4, 8, 1}});  // overlap
  refused({{at, std::size_t{1} << 63, 1}}, {});
  const Sends twice{{at, 8, 0}, {at, 8, 1}};  // only read
  EXPECT_NO_THROW(Request(call, kMe, kRanks, twice, Receives{}));
}

TEST_F(PartRequests, RefuseCountsThatDoNotFit) {
  const Counts four{1, 2, 3, 4}, three{1, 2, 3}, other{1, 2, 4, 4}, swapped{2, 1, 3, 4};
  EXPECT_THROW(Request(call, kMe, kRanks, four, three), UsageError);
  EXPECT_THROW(Request(call, kMe, kRanks, four, other), UsageError);  // the rank's part with itself
  EXPECT_NO_THROW(Request(call, kMe, kRanks, four, swapped));
  call.out = memory.data();
  EXPECT_NO_THROW(Request(call, kMe, kRanks, four, four));
  EXPECT_THROW(Request(call, kMe, kRanks, four, swapped), UsageError);  // in place
  call.out = memory.data() + 4;
  EXPECT_THROW(Request(call, kMe, kRanks, four, four), UsageError);
  const Counts nothing(kRanks, 0);
  Counts one = nothing;
  one[(kMe + 1) % kRanks] = 1;
  call.out = memory.data();  // no overlap, since one buffer is empty
  EXPECT_NO_THROW(Request(call, kMe, kRanks, one, nothing));
  EXPECT_NO_THROW(Request(call, kMe, kRanks, nothing, one));
}

TEST_F(PartRequests, RefuseCountsBeyondMemory) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const Counts& counts :
       {Counts{most, 0, 0, 0}, Counts{most / 20, most / 20, most / 20, most / 20, most / 20, most / 20}})
    EXPECT_THROW(Request(call, kMe, static_cast<int>(counts.size()), counts, counts), UsageError);
}

TEST(PairRequests, CheckTheirPeers) {
  std::vector<std::byte> memory(4096);
  const Call call{.in = memory.data(), .out = memory.data() + 2048, .count = kCount};
  using enum Collective;
  EXPECT_NO_THROW(Request(Collective::send, call, kMe, kRanks, 0, -1));
  EXPECT_NO_THROW(Request(Collective::recv, call, kMe, kRanks, -1, 3));
  EXPECT_NO_THROW(Request(send_recv, call, kMe, kRanks, kMe, kMe));
  EXPECT_THROW(Request(Collective::send, call, kMe, kRanks, kMe, -1), UsageError);
  EXPECT_THROW(Request(Collective::send, call, kMe, kRanks, kRanks, -1), UsageError);
  EXPECT_THROW(Request(Collective::recv, call, kMe, kRanks, -1, kMe), UsageError);
  EXPECT_THROW(Request(send_recv, call, kMe, kRanks, kMe, 1), UsageError);
  EXPECT_THROW(Request(send_recv, call, kMe, kRanks, -1, 1), UsageError);
  EXPECT_THROW(Request(send_recv, call, kMe, kRanks, 1, kRanks), UsageError);
}

TEST(Tickets, MatchUpToTheBuffers) {
  Ticket a{};
  a.collective = Collective::reduce, a.dtype = DType::f16, a.op = Op::max, a.root = 1, a.count = 7;
  Ticket b = a;
  b.in = {.allocation = 1, .offset = 2}, b.in_place = true, b.saves = 5;
  EXPECT_TRUE(a.matches(b));
  for (const auto& change : std::vector<void (*)(Ticket&)>{
           [](Ticket& t) { t.collective = Collective::broadcast; }, [](Ticket& t) { t.dtype = DType::f32; },
           [](Ticket& t) { t.op = Op::sum; }, [](Ticket& t) { t.root = 0; }, [](Ticket& t) { t.count = 8; },
           [](Ticket& t) { t.algorithm = Algorithm::push; }}) {
    b = a;
    change(b);
    EXPECT_FALSE(a.matches(b)) << b.text();
    EXPECT_NE(a.text(), b.text());
  }
  EXPECT_EQ(a.text(), "reduce(max) of 7 f16 with root 1");
}

TEST(Tickets, LeaveOutFieldsThatACallDoesNotHave) {
  Ticket a{}, b{};
  a.collective = b.collective = Collective::all_gather;
  b.op = Op::max, b.root = 3;
  EXPECT_TRUE(a.matches(b));
}

}  // namespace
}  // namespace unisono
