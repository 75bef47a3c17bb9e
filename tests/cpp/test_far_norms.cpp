// Fused norms between processes, from array to array: in symmetric memory, or by the kernel's copies. The
// same calls apart say which bits are right.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "far_ranks.hpp"
#include "norms.hpp"

namespace unisono::test {
namespace {

enum class Alias { none, x, residual, both, crossed };  // the inputs that are outputs

struct Kind {
  std::size_t rows, hidden;
  DType dtype = DType::f32;
  NormQuant quant = NormQuant::none;
  bool sharded = false;
  Alias alias = Alias::none;

  std::string text() const {
    return std::to_string(rows) + " x " + std::to_string(hidden) + " " + std::string(name_of(dtype)) +
           ", quant " + std::string(name_of(quant)) + (sharded ? ", sharded" : "") + ", alias " +
           std::to_string(static_cast<int>(alias));
  }
  RowRange held(const Communicator& comm) const {
    return sharded ? owned_rows(rows, comm.rank(), comm.size()) : RowRange{0, rows};
  }
  Arrays arrays(const Communicator& comm) const {
    return {dtype, rows, hidden, held(comm), comm.rank(), quant};
  }
};

// A call whose x, residual, out and residual_out lie where the test says.
class Placed {
 public:
  NormCall call;

  Placed(const Communicator& comm, const Kind& kind, std::byte* room)
      : kind_(kind), arrays_(kind.arrays(comm)), scales_(arrays_.scales) {
    const std::size_t apart = round_up(arrays_.x.size(), 4096) + 64;
    constexpr std::size_t kBefore = 16;  // bytes of a room that a test leaves out, at most
    if (4 * apart + kBefore > kRoom) throw std::length_error("the arrays are larger than the room");
    std::byte *const x = room, *const residual = room + apart, *const other = room + 2 * apart;
    arrays_.call.sharded = kind.sharded;
    call = arrays_.call;
    call.x = x;
    call.residual = residual;
    call.out = kind.alias == Alias::x || kind.alias == Alias::both ? x : other;
    call.residual_out = kind.alias == Alias::crossed                                 ? x
                        : kind.alias == Alias::residual || kind.alias == Alias::both ? residual
                                                                                     : other + apart;
    call.scales = scales_.data();
    fill();
  }
  std::size_t out_bytes() const {
    return kind_.rows * kind_.hidden * (kind_.quant == NormQuant::none ? size_of(kind_.dtype) : 1);
  }
  // Writes other bytes where the outputs go, then the inputs, as a round of the same call needs.
  void fill() {
    const std::size_t held = arrays_.residual_out.size();
    std::memset(call.out, 0x5A, out_bytes());
    std::memset(call.residual_out, 0x5A, held);
    std::ranges::fill(scales_, std::byte{0x5A});
    std::memcpy(const_cast<void*>(call.x), arrays_.x.data(), arrays_.x.size());
    if (held > 0) std::memcpy(const_cast<void*>(call.residual), arrays_.call.residual, held);
  }
  // Compares the outputs with those of the calls apart, which the first check makes.
  void check(Communicator& comm) {
    if (arrays_.call.algorithm != NormAlgorithm::apart) {
      arrays_.call.algorithm = NormAlgorithm::apart;
      all_reduce_rms_norm(comm, arrays_.call);
      arrays_.out.resize(out_bytes());
    }
    const auto same = [](const Bytes& expected, const void* got) {
      return expected.empty() || std::memcmp(expected.data(), got, expected.size()) == 0;
    };
    const std::string what = kind_.text() + ", rank " + std::to_string(comm.rank());
    EXPECT_TRUE(same(arrays_.out, call.out)) << what;
    EXPECT_TRUE(same(arrays_.residual_out, call.residual_out)) << what;
    EXPECT_TRUE(same(arrays_.scales, scales_.data())) << what;
  }

 private:
  Kind kind_;
  Arrays arrays_;
  Bytes scales_;
};

std::vector<Kind> kinds(std::size_t ranks) {
  std::vector<Kind> all;
  for (const std::size_t rows : {std::size_t{1}, ranks - 1, ranks, 2 * ranks + 1, std::size_t{37}})
    for (const std::size_t hidden : {std::size_t{1}, std::size_t{257}, std::size_t{4099}})
      all.push_back({rows, hidden, rows % 2 ? DType::bf16 : DType::f32});
  all.push_back({7, 40'001, DType::f32});  // a row is longer than a chunk, and than what is near at once
  all.push_back({400, 1000, DType::f32});  // several steps
  for (const Alias alias : {Alias::x, Alias::residual, Alias::both, Alias::crossed})
    all.push_back({301, 509, DType::f32, NormQuant::none, false, alias});
  for (const Alias alias : {Alias::none, Alias::x, Alias::residual, Alias::both})
    all.push_back({301, 509, DType::f16, NormQuant::none, true, alias});
  all.push_back({1, 600, DType::f32, NormQuant::none, true});  // most ranks hold no row
  for (const NormQuant quant : {NormQuant::fp8, NormQuant::fp8_token, NormQuant::fp8_128, NormQuant::mx})
    for (const bool sharded : {false, true}) all.push_back({33, 640, DType::bf16, quant, sharded});
  return all;
}

// Makes calls of each kind. by_kernel: the kernel copies from array to array, where ranks learn their way in
// the fourth call of a size. counts: and nothing else, as it may do where ranks compare their calls.
void run_kinds(Rank& rank, std::byte* room, bool by_kernel, bool counts) {
  const auto n = static_cast<std::size_t>(rank.comm.size());
  const int first = counts && by_kernel ? rank.before_kernel() : 0;
  std::set<int> sizes;
  for (const Kind& kind : kinds(n)) {
    const bool direct = kind.quant == NormQuant::none && (kind.rows >= n || kind.sharded);
    const std::size_t row_bytes = kind.hidden * size_of(kind.dtype);
    const bool has_learned = first > 0 && !sizes.insert(std::bit_width(kind.rows * row_bytes)).second;
    Placed placed(rank.comm, kind, room);
    for (int i = 0; i <= first; ++i) {
      if (i > 0) placed.fill();
      const int copied = rank.copied([&] { all_reduce_rms_norm(rank.comm, placed.call); });
      placed.check(rank.comm);
      // rows that are longer than a chunk go by the collectives, which learn too
      if (!counts || has_learned || (i < first && row_bytes > 64 << 10)) continue;
      EXPECT_EQ(copied > 0, direct && by_kernel && i == first)
          << kind.text() << ": " << copied << " copies by the kernel";
    }
  }
}

class FarNorms : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FarNorms, testing::Values(2, 3, 4, 5));

TEST_P(FarNorms, GiveTheBitsOfTheCallsApart) {
  for (const bool check : {false, true})
    in_processes(GetParam(),
                 [check](Rank& rank) {
                   run_kinds(rank, rank.room() + 16, true, !check);
                   const auto symmetric = rank.comm.empty(kRoom);
                   run_kinds(rank, static_cast<std::byte*>(symmetric.data()), false, !check);
                 },
                 {.check = check});
}

// The kernel's copies are slow: chunks carry most calls.
TEST(FarNorm, CallsLearnTheirWay) {
  in_processes(2, [](Rank& rank) {
    delay_us = 300;
    std::mt19937 chance(3);
    for (int i = 0; i < (UNISONO_SANITIZED ? 40 : 150); ++i) {
      const std::size_t rows = 2 + chance() % 40, hidden = 300 + 128 * (chance() % 3);
      const Kind kind{rows, hidden, DType::f32, NormQuant::none, chance() % 4 == 0};
      Placed placed(rank.comm, kind, rank.room());
      all_reduce_rms_norm(rank.comm, placed.call);
      placed.check(rank.comm);
    }
  });
}

TEST(FarNorm, GoesByChunksIfTheKernelRefuses) {
  const Setting refused{.seems = [](int r) { return r == 0 ? Kernel::refuses : Kernel::slow; },
                        .copies = false};
  in_processes(
      2,
      [](Rank& rank) {
        const Kind kind{64, 1024};
        Placed placed(rank.comm, kind, rank.room());
        EXPECT_EQ(rank.copied([&] { all_reduce_rms_norm(rank.comm, placed.call); }), 0);
        placed.check(rank.comm);
      },
      refused);
}

// Nobody's outputs are touched.
TEST(FarNorm, OfOtherRowsOrNumbersIsAMismatch) {
  for (const bool check : {false, true})
    for (const bool rows : {false, true})
      in_processes(2,
                   [=](Rank& rank) {
                     Placed placed(rank.comm, {64, 1024}, rank.room());
                     const auto* const out = static_cast<const std::byte*>(placed.call.out);
                     const Bytes before(out, out + placed.out_bytes());
                     if (rank.comm.rank() == 1) {
                       if (rows) placed.call.rows = 32;
                       else placed.call.eps = 1e-3f;
                     }
                     const auto text =
                         text_of<MismatchError>([&] { all_reduce_rms_norm(rank.comm, placed.call); });
                     EXPECT_TRUE(has(text, "make the same call")) << text;
                     EXPECT_TRUE(std::equal(before.begin(), before.end(), out));
                   },
                   {.check = check});
}

// A rank dies before the first, second or third copy of its call.
TEST(FarNorm, ARankThatDiesIsNamedByAll) {
  for (const int copy : {0, 1, 2})
    in_processes(3, [=](Rank& rank) {
      const Placed placed(rank.comm, {500, 1024}, rank.room());
      rank.comm.barrier();
      if (rank.comm.rank() == 1) dies_at = copies + copy;
      const auto text = text_of<PeerLostError>([&] { all_reduce_rms_norm(rank.comm, placed.call); });
      EXPECT_TRUE(has(text, "rank 1 (process ")) << text;
    });
}

}  // namespace
}  // namespace unisono::test
