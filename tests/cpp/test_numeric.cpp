// numeric.hpp against formats decoded and encoded by ldexp and rounding in double (reference.hpp).
#include "base/numeric.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "reference.hpp"

namespace unisono {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits_of(float value) { return numeric::as_bits(value); }

template <class T>
struct Small;
template <>
struct Small<F16> {
  static constexpr test::Format format = test::kF16;
};
template <>
struct Small<BF16> {
  static constexpr test::Format format = test::kBF16;
};
template <>
struct Small<E4M3> {
  static constexpr test::Format format = test::kE4M3;
};
template <>
struct Small<E5M2> {
  static constexpr test::Format format = test::kE5M2;
};

template <class T>
class SmallFloats : public testing::Test {
 protected:
  static constexpr test::Format format = Small<T>::format;
  static constexpr std::uint32_t words = 2u << (format.exponent + format.mantissa);

  static std::uint32_t narrow(float value) { return Wide<T>::to(value).bits; }
  static bool nan(std::uint32_t word) { return std::isnan(test::decode(format, word)); }
  static void expect_narrow(float value) {
    const std::uint32_t got = narrow(value), expected = test::encode(format, value);
    if (nan(expected)) ASSERT_TRUE(nan(got)) << std::hex << bits_of(value);
    else ASSERT_EQ(got, expected) << std::hex << bits_of(value);
  }
};
using Formats = testing::Types<F16, BF16, E4M3, E5M2>;
TYPED_TEST_SUITE(SmallFloats, Formats);

TYPED_TEST(SmallFloats, EveryWordWidensExactly) {
  for (std::uint32_t word = 0; word < this->words; ++word) {
    const float got = Wide<TypeParam>::from({static_cast<decltype(TypeParam::bits)>(word)});
    const double expected = test::decode(this->format, word);
    if (std::isnan(expected)) ASSERT_TRUE(std::isnan(got)) << std::hex << word;
    else ASSERT_EQ(bits_of(got), bits_of(static_cast<float>(expected))) << std::hex << word;
  }
}

TYPED_TEST(SmallFloats, EveryWordComesBack) {
  for (std::uint32_t word = 0; word < this->words; ++word) {
    const std::uint32_t back =
        this->narrow(Wide<TypeParam>::from({static_cast<decltype(TypeParam::bits)>(word)}));
    if (this->nan(word)) ASSERT_TRUE(this->nan(back)) << std::hex << word;
    else ASSERT_EQ(back, word);
  }
}

TYPED_TEST(SmallFloats, NarrowsRandomBits) {
  std::mt19937 random(1);
  for (int i = 0; i < 400000; ++i) this->expect_narrow(numeric::as_float(random()));
}

// Tries the middle between each two neighbours, and its neighbours in f32. These cover ties, denormals, the
// step to the normal numbers, and overflow.
TYPED_TEST(SmallFloats, NarrowsAroundEveryTie) {
  for (std::uint32_t word = 0; word + 1 < this->words / 2; ++word) {
    const double low = test::decode(this->format, word), high = test::decode(this->format, word + 1);
    if (std::isnan(low) || std::isnan(high) || std::isinf(low)) continue;
    const double top = std::isinf(high) ? 2 * low - test::decode(this->format, word - 1) : high;
    const auto middle = static_cast<float>((low + top) / 2);
    for (const float value :
         {middle, std::nextafter(middle, 0.f), std::nextafter(middle, kInf), static_cast<float>(low)}) {
      this->expect_narrow(value);
      this->expect_narrow(-value);
    }
  }
}

TYPED_TEST(SmallFloats, NarrowsSpecialValues) {
  for (const float value : {0.f, -0.f, kInf, -kInf, kNan, std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::min(), std::numeric_limits<float>::denorm_min(),
                            448.f, 464.f, 465.f, 480.f, 65504.f, 65519.f, 65520.f, 57344.f, 61439.f, 61440.f})
    this->expect_narrow(value), this->expect_narrow(-value);
  for (const std::uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u})
    EXPECT_TRUE(this->nan(this->narrow(numeric::as_float(nan)))) << std::hex << nan;
}

TEST(Combine, MinAndMaxGiveNanIfAnyOperandIsNan) {
  for (const auto& [a, b] :
       {std::pair(kNan, 1.f), std::pair(1.f, kNan), std::pair(kNan, kNan), std::pair(kInf, kNan)}) {
    EXPECT_TRUE(std::isnan((combine<Op::min, float>(a, b))));
    EXPECT_TRUE(std::isnan((combine<Op::max, float>(a, b))));
    EXPECT_TRUE(std::isnan((combine<Op::max, F16>(a, b))));
  }
}

TEST(Combine, OfEqualValuesTheEarlierStays) {
  EXPECT_TRUE(std::signbit(combine<Op::min, float>(-0.f, 0.f)));
  EXPECT_FALSE(std::signbit(combine<Op::min, float>(0.f, -0.f)));
  EXPECT_TRUE(std::signbit(combine<Op::max, double>(-0., 0.)));
  EXPECT_FALSE(std::signbit(combine<Op::max, double>(0., -0.)));
}

template <Op op, class T>
T of_two(T a, T b) {
  return Wide<T>::to(finish<op, T>(combine<op, T>(Wide<T>::from(a), Wide<T>::from(b)), 2));
}

template <class T>
class Integers : public testing::Test {};
using IntegerTypes = testing::Types<std::int8_t, std::uint8_t, std::int32_t, std::int64_t>;
TYPED_TEST_SUITE(Integers, IntegerTypes);

TYPED_TEST(Integers, Wrap) {
  using T = TypeParam;
  using Limits = std::numeric_limits<T>;
  EXPECT_EQ((of_two<Op::sum, T>(Limits::max(), 1)), Limits::min());
  EXPECT_EQ((of_two<Op::prod, T>(Limits::max(), 2)), static_cast<T>(-2));
  EXPECT_EQ((of_two<Op::prod, T>(Limits::min(), Limits::min())), static_cast<T>(0));
}

TYPED_TEST(Integers, MinAndMaxKnowTheSign) {
  using T = TypeParam;
  using Limits = std::numeric_limits<T>;
  EXPECT_EQ((of_two<Op::min, T>(Limits::max(), Limits::min())), Limits::min());
  EXPECT_EQ((of_two<Op::max, T>(Limits::max(), Limits::min())), Limits::max());
  EXPECT_EQ((of_two<Op::max, T>(Limits::min(), 3)), 3);
}

TYPED_TEST(Integers, AreCombinedBitByBit) {
  using T = TypeParam;
  std::mt19937_64 random(3);
  for (int i = 0; i < 1000; ++i) {
    const auto a = static_cast<T>(random()), b = static_cast<T>(random());
    T both = 0, either = 0, one = 0;
    for (unsigned bit = 0; bit < 8 * sizeof(T); ++bit) {
      const int x = a >> bit & 1, y = b >> bit & 1;
      const auto place = static_cast<T>(std::uint64_t{1} << bit);
      if (x + y == 2) both = static_cast<T>(both | place);
      if (x + y > 0) either = static_cast<T>(either | place);
      if (x + y == 1) one = static_cast<T>(one | place);
    }
    EXPECT_EQ((of_two<Op::band, T>(a, b)), both);
    EXPECT_EQ((of_two<Op::bor, T>(a, b)), either);
    EXPECT_EQ((of_two<Op::bxor, T>(a, b)), one);
  }
}

TYPED_TEST(Integers, AverageTruncatesTowardZero) {
  using T = TypeParam;
  EXPECT_EQ((of_two<Op::avg, T>(2, 5)), 3);
  if (std::is_signed_v<T>) {
    EXPECT_EQ((of_two<Op::avg, T>(static_cast<T>(-2), static_cast<T>(-5))), static_cast<T>(-3));
  }
}

TEST(Finish, AverageIsOfTheExactSum) {
  EXPECT_EQ((of_two<Op::avg, std::int8_t>(127, 127)), 127);
  EXPECT_EQ((of_two<Op::avg, std::uint8_t>(255, 255)), 255);
  EXPECT_EQ((of_two<Op::avg, std::int32_t>(2147483647, 2147483647)), 2147483647);
  EXPECT_EQ((of_two<Op::avg, float>(1.f, 2.f)), 1.5f);
  EXPECT_EQ((finish<Op::avg, double>(1., 3)), 1. / 3);
  EXPECT_EQ((finish<Op::sum, double>(1., 3)), 1.);
}

}  // namespace
}  // namespace unisono
