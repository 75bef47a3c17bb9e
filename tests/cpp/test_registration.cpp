// Registrations of C++ programs: ranks that are threads, on the host lane, the fabric, and several nodes.
#include "unisono/registration.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/allocation.hpp"
#include "core/backend.hpp"
#include "fabric_here.hpp"
#include "nodes_world.hpp"
#include "ranks.hpp"

namespace unisono::test {
namespace {

using Floats = std::vector<float>;

MemoryRange range_of(const std::shared_ptr<Floats>& of) {
  return {.data = of->data(), .bytes = of->size() * sizeof(float), .owner = of};
}

float sum_of(Communicator& comm, const Floats& x) {
  Floats sums(x.size());
  comm.all_reduce({.in = x.data(), .out = sums.data(), .count = x.size()});
  return sums.back();
}

void keeps_the_owner(Communicator& comm) {
  auto x = std::make_shared<Floats>(100000, 1.0F);
  const std::weak_ptr<Floats> kept = x;
  Registration one = comm.register_memory(range_of(x)), same = one;
  EXPECT_EQ(one.bytes(), x->size() * sizeof(float));
  EXPECT_EQ(sum_of(comm, *x), static_cast<float>(comm.size()));
  x.reset();
  EXPECT_FALSE(kept.expired());
  EXPECT_FALSE(one.closed());
  one.close();
  EXPECT_TRUE(same.closed());
  same.close();
  EXPECT_TRUE(kept.expired());
  EXPECT_TRUE(Registration().closed());
  Registration().close();
}

TEST(Registration, KeepsTheOwnerUntilItsClose) { on_ranks(3, keeps_the_owner); }

TEST(Registration, LastsWithoutItsHandleAndNotWithoutItsCommunicator) {
  std::weak_ptr<Floats> kept[2];
  Registration left[2];
  on_ranks(2, [&](Communicator& comm) {
    auto x = std::make_shared<Floats>(100, 1.0F), y = std::make_shared<Floats>(100, 1.0F);
    const auto me = static_cast<std::size_t>(comm.rank());
    kept[me] = x;
    comm.register_memory(range_of(x));
    left[me] = comm.register_memory(range_of(y));
    x.reset();
    comm.barrier();
    EXPECT_FALSE(kept[me].expired());
  });
  for (const int r : {0, 1}) {
    EXPECT_TRUE(kept[r].expired());
    EXPECT_TRUE(left[r].closed());
    left[r].close();  // of a communicator that is gone
  }
}

TEST(Registration, OneRankIsRefusedForAll) {
  on_ranks(3, [](Communicator& comm) {
    auto x = std::make_shared<Floats>(10, 1.0F);
    auto refused = [&](MemoryRange wrong) {
      const bool last = comm.rank() == 2;
      return text_of<UsageError>([&] { comm.register_memory(last ? wrong : range_of(x)); });
    };
    EXPECT_EQ(refused({.problem = "it has a hole."}), "rank 2 cannot register its memory: it has a hole.");
    EXPECT_TRUE(
        has(refused({.data = nullptr, .bytes = 40}), "rank 2 cannot register its memory: its address"));
    EXPECT_TRUE(has(refused({.data = x->data(), .bytes = 40, .memory = Memory::device}), "has no GPU"));
    EXPECT_TRUE(has(refused({.data = x->data(), .bytes = 36}), "rank 0 registers 40 bytes, but rank 2 36"));
    const Buffer symmetric = comm.empty(40);
    EXPECT_TRUE(has(refused({.data = symmetric.data(), .bytes = 40}), "is symmetric memory already"));
    const Registration one = comm.register_memory(range_of(x));
    EXPECT_TRUE(has(refused(range_of(x)), "overlaps memory that is registered"));
    EXPECT_EQ(sum_of(comm, *x), 3);
  });
}

TEST(Registration, LongReasonsAreCut) {
  on_ranks(2, [](Communicator& comm) {
    const std::string text =
        text_of<UsageError>([&] { comm.register_memory({.problem = std::string(5000, 'x')}); });
    EXPECT_TRUE(text.size() > 500 && text.size() < 700) << text.size();
    comm.barrier();
  });
}

TEST(Registration, EndsOnOneRankIfTheCommunicatorIsClosed) {
  on_ranks(2, [](Communicator& comm) {
    auto x = std::make_shared<Floats>(100, 1.0F);
    const std::weak_ptr<Floats> kept = x;
    Registration one = comm.register_memory(range_of(x));
    x.reset();
    comm.barrier();
    comm.close();
    EXPECT_TRUE(one.closed());
    EXPECT_FALSE(kept.expired());
    one.close();
    EXPECT_TRUE(kept.expired());
  });
}

TEST(Registration, OfNothingAndWithoutOwner) {
  on_ranks(2, [](Communicator& comm) {
    Floats x(10, 1.0F);
    Registration none = comm.register_memory({}), one = comm.register_memory({.data = x.data(), .bytes = 40});
    EXPECT_FALSE(none.closed());
    none.close();
    EXPECT_TRUE(none.closed());
    EXPECT_FALSE(one.closed());
    one.close();
    EXPECT_TRUE(one.closed());
  });
}

// ---- the fabric -------------------------------------------------------------------------------------------

class RegistrationOnFabric : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const std::string why = no_fabric(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
  Communicator::Options options() const {
    return {.timeout_s = 60, .check = false, .fabric = Communicator::Fabric{.provider = GetParam()}};
  }
};
INSTANTIATE_TEST_SUITE_P(Providers, RegistrationOnFabric, testing::Values("tcp", "shm"));

TEST_P(RegistrationOnFabric, KeepsTheOwnerUntilItsClose) { on_ranks(2, options(), keeps_the_owner); }

TEST_P(RegistrationOnFabric, IsWrittenToDirectly) {
  on_ranks(2, options(), [](Communicator& comm) {
    constexpr std::size_t count = 50000;
    auto pool = std::make_shared<Floats>(6 * count, 0.0F);
    float* const x = pool->data() + count / 2;
    float* const out = x + 2 * count;
    for (std::size_t p = 0; p < 2; ++p)
      std::fill_n(x + p * count, count, static_cast<float>(10 * comm.rank() + static_cast<int>(p)));
    const Call call{.in = x, .out = out, .count = count, .algorithm = "direct"};
    auto direct = [&] {
      std::fill_n(out, 2 * count, -1.0F);
      comm.all_to_all(call);
      for (std::size_t p = 0; p < 2; ++p)
        for (const std::size_t i : {std::size_t{0}, count - 1})
          EXPECT_EQ(out[p * count + i], static_cast<float>(10 * static_cast<int>(p) + comm.rank()));
    };
    EXPECT_TRUE(has(text_of<UsageError>(direct), "direct needs registered buffers"));
    Registration one = comm.register_memory(range_of(pool));
    direct();
    one.close();
    EXPECT_TRUE(has(text_of<UsageError>(direct), "direct needs registered buffers"));
    one = comm.register_memory(range_of(pool));
    direct();
  });
}

// ---- nodes ------------------------------------------------------------------------------------------------

class RegistrationOnNodes : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Layouts, RegistrationOnNodes, testing::Values("ab", "aabb", "aba"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(RegistrationOnNodes, IsOfAllRanksOrOfNone) {
  for (const bool check : {false, true})
    World{.layout = GetParam(), .check = check}.run([](Communicator::Impl& comm) {
      auto x = std::make_shared<Floats>(10, 1.0F);
      const std::weak_ptr<Floats> kept = x;
      const int last = comm.size() - 1;
      const std::string who = "rank " + std::to_string(last);
      auto refused = [&](MemoryRange wrong) {
        return text_of<UsageError>([&] { comm.register_memory(comm.rank() == last ? wrong : range_of(x)); });
      };
      EXPECT_EQ(refused({.problem = "no."}), who + " cannot register its memory: no.");
      EXPECT_EQ(refused({.data = x->data(), .bytes = 36}),
                "rank 0 registers 40 bytes, but " + who + " 36: register as many on every rank.");
      const auto symmetric = comm.allocate(40, Memory::host);
      // found on one node alone, after the ranks have agreed on all that they can tell without looking
      EXPECT_EQ(refused({.data = symmetric.get(), .bytes = 40}),
                who +
                    " cannot register its memory: it is symmetric memory already: use memory of "
                    "Communicator::empty as it is.");
      const auto one = comm.register_memory(range_of(x));
      x.reset();
      EXPECT_FALSE(kept.expired());
      comm.end(*one);
      EXPECT_TRUE(kept.expired());
      EXPECT_EQ(one->of, nullptr);
    });
}

TEST(RegistrationAcrossNodes, EndsThatDifferFailAll) {
  World{"aab"}.run([](Communicator::Impl& comm) {
    Floats x(10), y(10);
    const auto first = comm.register_memory({.data = x.data(), .bytes = 40});
    const auto second = comm.register_memory({.data = y.data(), .bytes = 40});
    const std::string text = text_of<MismatchError>([&] { comm.end(comm.rank() == 2 ? *second : *first); });
    EXPECT_TRUE(has(text,
                    "rank 0 called Registration.close of registration 1, but rank 2 called "
                    "Registration.close of registration 2"))
        << text;
    EXPECT_EQ(text_of<MismatchError>([&] { comm.barrier(); }), text);
  });
}

TEST(RegistrationAcrossNodes, AnAllocationOfOtherLengthsFailsAll) {
  World{"ab"}.run([](Communicator::Impl& comm) {
    const std::string text =
        text_of<MismatchError>([&] { comm.allocate(comm.rank() == 0 ? 10 : 20, Memory::host); });
    EXPECT_TRUE(has(text, "rank 0 asked for 10 bytes of symmetric memory, but rank 1 for 20")) << text;
  });
}

}  // namespace
}  // namespace unisono::test
