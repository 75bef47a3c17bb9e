// The fused norms: the kernels of every instruction set of this machine against their definition, and calls
// of ranks on the host lane against one rank. test_far_norms.cpp has ranks in processes of their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "instruction_sets.hpp"
#include "norms.hpp"
#include "ranks.hpp"
#include "reference.hpp"

namespace unisono::test {
namespace {

constexpr std::size_t kCounts[] = {1, 7, 8, 63, 100, 128, 1023, 1024, 1025, 1537, 4096, 7168, 10'001};
constexpr DType kFloats[] = {DType::f32, DType::f16, DType::bf16};

// Returns the sum of `count` terms by the definition in src/base/norm.hpp.
template <class Term>
float sum_of(std::size_t count, const Term& term) {
  std::vector<float> partials(1024);
  for (std::size_t i = 0; i < count; ++i) partials[i % 1024] += term(i);
  for (std::size_t width = 512; width > 0; width /= 2)
    for (std::size_t j = 0; j < width; ++j) partials[j] += partials[j + width];
  return partials[0];
}

Bytes normalised(DType dtype, bool layer, const Bytes& row, const Bytes& weight, const Bytes& bias, float eps,
                 std::size_t count) {
  const auto n = static_cast<float>(count);
  const auto at = [&](std::size_t i) { return read(dtype, row.data(), i); };
  const float mean = layer ? sum_of(count, at) / n : 0;
  const float squares = sum_of(count, [&](std::size_t i) {
    const float value = layer ? at(i) - mean : at(i);
    return value * value;
  });
  const auto root = static_cast<float>(std::sqrt(static_cast<double>(squares / n + eps)));
  const auto factor = static_cast<float>(1.0 / static_cast<double>(root));
  Bytes out(row.size());
  for (std::size_t i = 0; i < count; ++i) {
    const float scaled = (layer ? at(i) - mean : at(i)) * factor;
    const float weighed = scaled * read(dtype, weight.data(), i);
    write(dtype, out.data(), i, bias.empty() ? weighed : weighed + read(dtype, bias.data(), i));
  }
  return out;
}

class NormKernels : public testing::TestWithParam<DType> {
 protected:
  const DType dtype = GetParam();
  const std::size_t size = size_of(dtype);
};
INSTANTIATE_TEST_SUITE_P(Floats, NormKernels, testing::ValuesIn(kFloats));

TEST_P(NormKernels, JoinSumsInOrderAndAddsTheResidual) {
  for (const std::size_t count : kCounts)
    for (const int n : {1, 2, 3, 4, 5, 8}) {
      std::vector<Bytes> xs;
      std::vector<const std::byte*> srcs;
      for (int s = 0; s < n; ++s)
        xs.push_back(row_of(dtype, count, count + static_cast<std::size_t>(s), s == 1));
      for (const Bytes& x : xs) srcs.push_back(x.data());
      const Bytes residual = row_of(dtype, count, 99, true);
      Bytes expected(count * size);
      for (std::size_t i = 0; i < count; ++i) {
        float sum = read(dtype, srcs[0], i);
        for (std::size_t s = 1; s < srcs.size(); ++s) sum += read(dtype, srcs[s], i);
        write(dtype, expected.data(), i, rounded(dtype, sum) + read(dtype, residual.data(), i));
      }
      for (const host::Kernels* kernels : all_kernels()) {
        const auto join = kernels->norms.join[static_cast<int>(dtype)];
        Bytes out(expected.size()), in_place = residual;
        join(out.data(), srcs.data(), n, residual.data(), count);
        EXPECT_EQ(first_difference(dtype, out.data(), expected.data(), count), -1)
            << kernels->instruction_set << ", " << n << " of " << count;
        join(in_place.data(), srcs.data(), n, in_place.data(), count);
        EXPECT_EQ(in_place, out) << kernels->instruction_set << ", " << n << " of " << count << " in place";
      }
    }
}

TEST_P(NormKernels, NormaliseByTheDefinition) {
  for (const std::size_t count : kCounts)
    for (const bool layer : {false, true})
      for (std::uint64_t seed = 0; seed < 6; ++seed) {
        const Bytes row = seed == 5 ? Bytes(count * size) : row_of(dtype, count, seed * 7, seed == 4);
        const Bytes weight = row_of(dtype, count, 14, false);
        const Bytes bias = layer && seed % 2 ? row_of(dtype, count, 13, false) : Bytes();
        const float eps = seed == 3 ? 0.0f : 1e-6f;
        const Bytes expected = normalised(dtype, layer, row, weight, bias, eps, count);
        for (const host::Kernels* kernels : all_kernels()) {
          Bytes out = row;  // in place
          kernels->norms.normalise[static_cast<int>(dtype)][layer](
              out.data(), out.data(), row.data(), {weight.data(), bias.empty() ? nullptr : bias.data(), eps},
              count);
          EXPECT_EQ(first_difference(dtype, out.data(), expected.data(), count), -1)
              << kernels->instruction_set << ", " << count << ", seed " << seed;
          for (const std::size_t before : {std::size_t{0}, size, 3 * size, std::size_t{1}}) {
            constexpr std::size_t kAround = 64;
            Bytes around(kAround + before + out.size() + kAround, std::byte{0x5a});
            std::byte* const to = around.data() + kAround + before;
            kernels->norms.normalise[static_cast<int>(dtype)][layer](
                to, row.data(), row.data(), {weight.data(), bias.empty() ? nullptr : bias.data(), eps, true},
                count);
            EXPECT_EQ(first_difference(dtype, to, expected.data(), count), -1)
                << kernels->instruction_set << ", " << count << ", seed " << seed << ", " << before;
            const auto kept = std::ranges::count(std::span(around.data(), to), std::byte{0x5a}) +
                              std::count(to + out.size(), around.data() + around.size(), std::byte{0x5a});
            EXPECT_EQ(kept, kAround + before + kAround);
          }
        }
      }
}

TEST_P(NormKernels, QuantiseBySaturationAndByRow) {
  for (const std::size_t count : kCounts)
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      const Bytes row = row_of(dtype, count, seed * 3, seed % 2 == 1);
      for (const NormQuant quant : {NormQuant::fp8, NormQuant::fp8_token}) {
        float largest = 1e-4f, inverse = 1 / 0.01f;
        bool finite = true;
        for (std::size_t i = 0; i < count; ++i) {
          finite = finite && std::isfinite(read(dtype, row.data(), i));
          largest = std::max(largest, std::fabs(read(dtype, row.data(), i)));
        }
        if (quant == NormQuant::fp8_token) inverse = 448 / largest;
        Bytes expected(count);
        for (std::size_t i = 0; i < count; ++i) {
          const float scaled = read(dtype, row.data(), i) * inverse;
          const float within = std::isnan(scaled) ? scaled : std::fmin(std::fmax(scaled, -448.0f), 448.0f);
          const bool nan_row = quant == NormQuant::fp8_token && !finite;
          expected[i] = nan_row ? std::byte{0x7f} : static_cast<std::byte>(encode(kE4M3, within));
        }
        for (const host::Kernels* kernels : all_kernels()) {
          Bytes codes(count + 1, std::byte{0x5a});
          float scale = -1;
          kernels->norms.quantise[static_cast<int>(dtype)][static_cast<int>(quant)](
              codes.data(), reinterpret_cast<std::byte*>(&scale), row.data(), inverse, count);
          EXPECT_EQ(first_difference(DType::f8e4m3, codes.data(), expected.data(), count), -1)
              << kernels->instruction_set << ", " << count << ", " << name_of(quant);
          EXPECT_EQ(codes[count], std::byte{0x5a});
          if (quant == NormQuant::fp8_token && !finite) EXPECT_TRUE(std::isnan(scale));
          else EXPECT_EQ(scale, quant == NormQuant::fp8 ? -1.0f : largest / 448);
        }
      }
    }
}

// Every algorithm gives the bits of the ranks' all_reduce, followed by a call of one rank.
void check_ranks(int ranks, std::size_t rows, std::size_t hidden, DType dtype, NormQuant quant) {
  on_ranks(ranks, [&](Communicator& comm) {
    const RowRange all{0, rows};
    Arrays apart(dtype, rows, hidden, all, comm.rank(), quant);
    comm.all_reduce({.in = apart.x.data(), .out = apart.x.data(), .count = rows * hidden, .dtype = dtype});
    on_ranks(1, [&](Communicator& alone) { all_reduce_rms_norm(alone, apart.call); });
    for (const bool sharded : {false, true})
      for (const NormAlgorithm algorithm : {NormAlgorithm::automatic, NormAlgorithm::one_shot,
                                            NormAlgorithm::two_shot, NormAlgorithm::apart}) {
        if (sharded && algorithm == NormAlgorithm::one_shot) continue;
        const RowRange held = sharded ? owned_rows(rows, comm.rank(), ranks) : all;
        Arrays fused(dtype, rows, hidden, held, comm.rank(), quant);
        fused.call.sharded = sharded;
        fused.call.algorithm = algorithm;
        all_reduce_rms_norm(comm, fused.call);
        const std::string what = std::string(name_of(algorithm)) + ", rank " + std::to_string(comm.rank());
        EXPECT_EQ(fused.out, apart.out) << what;
        EXPECT_EQ(fused.scales, apart.scales) << what;
        const std::byte* const theirs = apart.residual_out.data() + held.first * hidden * size_of(dtype);
        EXPECT_TRUE(std::equal(fused.residual_out.begin(), fused.residual_out.end(), theirs)) << what;
      }
  });
}

TEST(FusedNorm, AlgorithmsGiveTheBitsOfTheCallsApart) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    check_ranks(ranks, 37, 640, DType::bf16, NormQuant::none);
    check_ranks(ranks, 3, 4099, DType::f16, NormQuant::fp8_128);
    check_ranks(ranks, 70, 257, DType::f32, NormQuant::mx);
    check_ranks(ranks, 1, 128, DType::bf16, NormQuant::fp8);
  }
}

TEST(FusedNorm, RowsLongerThanAPieceGoByTheCallsApart) {
  check_ranks(2, 5, 20'001, DType::f32, NormQuant::fp8_token);
}

TEST(FusedNorm, WrongCallsAreRefused) {
  on_ranks(2, [](Communicator& comm) {
    Arrays a(DType::f32, 4, 16, {0, 4}, comm.rank(), NormQuant::none);
    const auto refused = [&](const auto& change) {
      NormCall call = a.call;
      change(call);
      return text_of<UsageError>([&] { all_reduce_rms_norm(comm, call); });
    };
    EXPECT_TRUE(has(refused([](NormCall& c) { c.hidden = 0; }), "hidden is 0"));
    EXPECT_TRUE(has(refused([](NormCall& c) { c.dtype = DType::f64; }), "rows of f64 cannot be normalised"));
    EXPECT_TRUE(has(refused([](NormCall& c) { c.eps = -1; }), "eps is -1"));
    EXPECT_TRUE(has(refused([](NormCall& c) { c.eps = NAN; }), "eps is"));
    EXPECT_TRUE(has(refused([](NormCall& c) { c.weight = nullptr; }), "weight is missing"));
    EXPECT_TRUE(has(refused([](NormCall& c) { c.bias = c.weight; }), "an RMS norm has no bias"));
    EXPECT_TRUE(has(refused([](NormCall& c) { c.residual_out = c.out; }), "out overlaps residual_out"));
    EXPECT_TRUE(has(refused([](NormCall& c) { c.out = const_cast<void*>(c.weight); }), "overlaps"));
    EXPECT_TRUE(has(refused([](NormCall& c) { c.rows = SIZE_MAX / 8; }), "more than memory can hold"));
    EXPECT_TRUE(has(refused([](NormCall& c) {
                      c.quant = NormQuant::fp8;
                      c.scale = 0;
                    }),
                    "the scale is 0"));
    EXPECT_TRUE(has(refused([](NormCall& c) { c.quant = NormQuant::mx; }), "scales is missing"));
    EXPECT_TRUE(has(refused([](NormCall& c) {
                      c.sharded = true;
                      c.algorithm = NormAlgorithm::one_shot;
                    }),
                    "one_shot needs the whole residual"));
    all_reduce_rms_norm(comm, a.call);
  });
}

TEST(FusedNorm, RanksThatDifferAreTold) {
  for (const bool check : {false, true}) {
    Texts texts(2);
    on_ranks(2, {.timeout_s = 120, .check = check}, [&](Communicator& comm) {
      Arrays a(DType::f32, 4, 16, {0, 4}, comm.rank(), NormQuant::none);
      if (comm.rank() == 1) a.call.eps = 1e-5f;
      texts[comm.rank()] = text_of<MismatchError>([&] { all_reduce_rms_norm(comm, a.call); });
    });
    texts.expect_one();
    EXPECT_EQ(has(texts[0], "eps 9.99999997e-07, but rank 1 called"), check) << texts[0];
  }
}

}  // namespace
}  // namespace unisono::test
