// Weighted sums of rows, and rows of 8-bit floats with scales, by the kernels of every instruction set of
// this machine, against references in wider types.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "host/rows.hpp"
#include "instruction_sets.hpp"
#include "reference.hpp"

namespace unisono::host {
namespace {

using test::all_kernels;
using test::Bytes;

constexpr std::size_t kMargin = 64;

float read(DType dtype, const std::byte* at, std::size_t i) {
  if (dtype == DType::f32) return test::get<float>(at, i);
  return static_cast<float>(test::decode(*test::format_of(dtype), test::get<std::uint16_t>(at, i)));
}
void write(DType dtype, std::byte* at, std::size_t i, float value) {
  if (dtype == DType::f32) test::put(at, i, value);
  else test::put(at, i, static_cast<std::uint16_t>(test::encode(*test::format_of(dtype), value)));
}

// Returns a row at an odd address: blocks of 128 elements of every magnitude, the first few with the limits
// of the arithmetic.
class Row {
 public:
  Row(DType dtype, std::size_t count, std::uint64_t seed, bool specials = true)
      : storage_(count * size_of(dtype) + 1) {
    std::mt19937_64 random(seed);
    int power = 0;
    bool special = false;
    for (std::size_t i = 0; i < count; ++i) {
      if (i % 128 == 0) {
        power = static_cast<int>(random() % 278) - 149;
        if (dtype == DType::f16 || random() % 2) power = static_cast<int>(random() % 40) - 24;
        special = specials && random() % 4 == 0;
      }
      double value = std::ldexp(static_cast<double>(random() % 4096) / 2048 - 1, power);
      if (random() % 16 == 0) value = random() % 2 ? 0.0 : -0.0;
      if (special && random() % 64 == 0) value = random() % 2 ? -NAN : random() % 2 ? INFINITY : -INFINITY;
      write(dtype, storage_.data() + 1, i, static_cast<float>(value));
    }
  }
  std::byte* data() { return storage_.data() + 1; }
  const std::byte* data() const { return storage_.data() + 1; }

 private:
  Bytes storage_;
};

class OfRows : public testing::TestWithParam<DType> {
 protected:
  const DType dtype = GetParam();
  const std::size_t size = size_of(dtype);
};
INSTANTIATE_TEST_SUITE_P(All, OfRows, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

const std::size_t kCounts[] = {0, 1, 3, 63, 64, 127, 128, 129, 255, 1000, 1024, 2880, 7168};

TEST_P(OfRows, AreWeighedInTheirOrder) {
  for (const std::size_t count : kCounts) {
    for (const int n : {1, 2, 3, 8, 9}) {
      std::vector<Row> rows;
      std::vector<const std::byte*> srcs;
      std::vector<float> weights;
      for (int s = 0; s < n; ++s) {
        rows.emplace_back(dtype, count, count * 16 + static_cast<std::size_t>(s));
        weights.push_back(0.37f * static_cast<float>(s) - 0.61f);
      }
      for (const Row& row : rows) srcs.push_back(row.data());
      for (const bool weighted : {true, false}) {
        Bytes expected(count * size);
        for (std::size_t i = 0; i < count; ++i) {
          float sum = 0;
          for (std::size_t s = 0; s < rows.size(); ++s) {
            const float value = read(dtype, srcs[s], i);
            const float product = weighted ? weights[s] * value : value;
            sum = s == 0 ? product : sum + product;
          }
          write(dtype, expected.data(), i, sum);
        }
        for (const Kernels* kernels : all_kernels()) {
          Bytes out(expected.size() + 2 * kMargin, std::byte{0x5a});
          std::byte* to = out.data() + kMargin - 3;
          kernels->rows.weigh[static_cast<int>(dtype)](to, srcs.data(), weighted ? weights.data() : nullptr,
                                                       n, count);
          EXPECT_EQ(test::first_difference(dtype, to, expected.data(), count), -1)
              << kernels->instruction_set << ", " << n << " rows of " << count;
          EXPECT_EQ(to[-1], std::byte{0x5a});
          EXPECT_EQ(to[expected.size()], std::byte{0x5a});
        }
      }
    }
  }
}

TEST_P(OfRows, AreWeighedInPlaceOfOne) {
  const std::size_t count = 1027;
  const float weights[] = {0.3f, -1.7f, 2.1f};
  for (const Kernels* kernels : all_kernels()) {
    const auto weigh = kernels->rows.weigh[static_cast<int>(dtype)];
    for (const float* by : {static_cast<const float*>(weights), static_cast<const float*>(nullptr)}) {
      for (std::size_t own = 0; own < 3; ++own) {
        std::vector<Row> rows;
        for (std::size_t s = 0; s < 3; ++s) rows.emplace_back(dtype, count, s);
        const std::byte* const srcs[] = {rows[0].data(), rows[1].data(), rows[2].data()};
        Bytes expected(count * size);
        weigh(expected.data(), srcs, by, 3, count);
        weigh(rows[own].data(), srcs, by, 3, count);
        EXPECT_EQ(std::memcmp(rows[own].data(), expected.data(), expected.size()), 0)
            << kernels->instruction_set << " in place of " << own;
      }
    }
  }
}

TEST_P(OfRows, OneWithoutAWeightKeepsItsBits) {
  const Bytes row = test::random_bytes(4096 * size, 7);
  const std::byte* const src = row.data();
  for (const Kernels* kernels : all_kernels()) {
    Bytes out(row.size());
    kernels->rows.weigh[static_cast<int>(dtype)](out.data(), &src, nullptr, 1, 4096);
    EXPECT_EQ(out, row) << kernels->instruction_set;
  }
}

struct Quantised {
  Bytes codes, scales;
};

// Returns the codes and scales of a row by their definition. Quotients and products of two f32 in f64 round
// to the same f32.
Quantised quantised(DType dtype, const std::byte* row, std::size_t count, MoeScales form) {
  const std::size_t blocks = (count + 127) / 128;
  const bool powers = form == MoeScales::mx;
  Quantised result{Bytes(count), Bytes(powers ? (blocks + 3) / 4 * 4 : blocks * sizeof(float))};
  for (std::size_t b = 0; b < blocks; ++b) {
    float largest = 1e-4f;
    bool finite = true;
    const std::size_t begin = b * 128, end = std::min(count, begin + 128);
    for (std::size_t i = begin; i < end; ++i) {
      const float value = read(dtype, row, i);
      finite = finite && std::isfinite(value);
      largest = std::max(largest, std::fabs(value));
    }
    const auto scale = static_cast<float>(static_cast<double>(largest) / 448.0);
    auto inverse = static_cast<double>(static_cast<float>(448.0 / static_cast<double>(largest)));
    if (powers) {
      int exponent = -126;
      while (std::ldexp(1.0, exponent) < static_cast<double>(scale)) ++exponent;
      inverse = std::ldexp(1.0, -exponent);
      result.scales[b] = static_cast<std::byte>(finite ? exponent + 127 : 255);
    } else {
      test::put(
          result.scales.data(), b,
          finite ? test::get<std::uint32_t>(reinterpret_cast<const std::byte*>(&scale), 0) : 0x7fc00000u);
    }
    for (std::size_t i = begin; i < end; ++i) {
      const auto scaled = static_cast<float>(static_cast<double>(read(dtype, row, i)) * inverse);
      result.codes[i] = static_cast<std::byte>(finite ? test::encode(test::kE4M3, scaled) : 0x7f);
    }
  }
  return result;
}

void expect_quantised(DType dtype, const std::byte* row, std::size_t count) {
  for (const MoeScales form : {MoeScales::e4m3_128, MoeScales::mx}) {
    const Quantised expected = quantised(dtype, row, count, form);
    for (const Kernels* kernels : all_kernels()) {
      const std::string what = std::string(kernels->instruction_set) + ", form " +
                               std::to_string(static_cast<int>(form)) + ", " + std::to_string(count);
      Quantised got{Bytes(count + 2 * kMargin, std::byte{0x5a}),
                    Bytes(expected.scales.size() + 2 * kMargin, std::byte{0x5a})};
      std::byte *codes = got.codes.data() + kMargin - 1, *scales = got.scales.data() + kMargin - 1;
      kernels->rows.quantise[static_cast<int>(dtype)][static_cast<int>(form)](codes, scales, row, count);
      EXPECT_TRUE(std::equal(expected.codes.begin(), expected.codes.end(), codes)) << what;
      EXPECT_TRUE(std::equal(expected.scales.begin(), expected.scales.end(), scales)) << what;
      for (const std::byte beside : {codes[-1], codes[count], scales[-1], scales[expected.scales.size()]})
        EXPECT_EQ(beside, std::byte{0x5a}) << what;
    }
  }
}

TEST_P(OfRows, AreQuantisedByTheDefinition) {
  for (const std::size_t count : kCounts)
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      expect_quantised(dtype, Row(dtype, count, seed).data(), count);
      expect_quantised(dtype, Row(dtype, count, seed, false).data(), count);
    }
}

// A block's largest magnitude at the limits of the forms, with elements that then lie at every step of e4m3
// and at the ties between two steps.
TEST_P(OfRows, AreQuantisedAtTheLimits) {
  const float limits[] = {0.0f,
                          FLT_TRUE_MIN,
                          FLT_MIN,
                          1e-4f,
                          std::nextafter(1e-4f, 0.0f),
                          448.0f,
                          448.5f,
                          464.0f,
                          480.0f,
                          512.0f,
                          65504.0f,
                          std::ldexp(448.0f, 118),
                          FLT_MAX,
                          1.0f,
                          std::ldexp(448.0f, -20),
                          std::nextafter(448.0f, 1e9f)};
  for (const float limit : limits) {
    Bytes row(1024 * size);
    for (std::size_t i = 0; i < 1024; ++i) {
      const double part = test::decode(test::kE4M3, static_cast<std::uint32_t>(i / 2 % 127)) / 448;
      const double tie = 1 + static_cast<double>(i % 2) / 16;  // half of a step in most places
      const auto value = static_cast<float>(static_cast<double>(limit) * std::min(part * tie, 1.0));
      write(dtype, row.data(), i, i % 3 ? value : -value);
      if (i % 128 == 5) write(dtype, row.data(), i, limit);
    }
    expect_quantised(dtype, row.data(), 1024);
  }
}

}  // namespace
}  // namespace unisono::host
