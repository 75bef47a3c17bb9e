// Tests that sums on a GPU have the bits of the host's kernels. Skipped without a GPU.
#include <cmath>
#include <random>
#include <string>

#include "base/wire.hpp"
#include "cuda/combine.hpp"
#include "gpu.hpp"
#include "host/move.hpp"
#include "ranks.hpp"

namespace unisono::cuda {
namespace {

// Every dtype and op, as "f16_sum".
class Sums : public Gpu, public testing::WithParamInterface<std::pair<DType, Op>> {
 protected:
  const DType dtype = GetParam().first;
  const Op op = GetParam().second;
  const std::size_t size = size_of(dtype);
  const std::size_t wide_size = host::kernels().wide_bytes[static_cast<int>(dtype)];

  // Returns the dtype in which wide elements are compared: only floats have NaNs.
  DType wide_dtype() const {
    if (dtype == DType::f64) return DType::f64;
    const bool real = dtype == DType::f32 || test::format_of(dtype);
    if (real) return DType::f32;
    return wide_size == 8 ? DType::i64 : DType::i32;
  }

  // Returns random bits if `wild`, else numbers that can be combined several times before they overflow.
  Bytes numbers(std::size_t count, bool wild, std::uint64_t seed) const {
    Bytes made = test::random_bytes(count * size, seed);
    if (wild) return made;
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal(0, 2);
    for (std::size_t i = 0; i < count; ++i) {
      const double value = normal(random);
      if (const test::Format* f = test::format_of(dtype)) {
        if (size == 2) test::put(made.data(), i, static_cast<std::uint16_t>(test::encode(*f, value)));
        else test::put(made.data(), i, static_cast<std::uint8_t>(test::encode(*f, value)));
      } else if (dtype == DType::f32) test::put(made.data(), i, static_cast<float>(value));
      else if (dtype == DType::f64) test::put(made.data(), i, value);
    }
    return made;
  }

  void expect_hosts_bits(std::size_t count, int n, std::size_t offset, bool with_prior, int ranks,
                         bool wild) {
    std::vector<Bytes> inputs;
    for (int s = 0; s < n; ++s)
      inputs.push_back(numbers(count, wild, count * 131 + static_cast<std::uint64_t>(s)));
    const Arrays sources(inputs, offset * size);
    const host::Resume resume = host::kernels().resume[static_cast<int>(dtype)][static_cast<int>(op)];
    Bytes before(count * wide_size);
    const Bytes first = numbers(count, wild, 7);
    const byte* one = first.data();
    resume(before.data(), nullptr, &one, 1, count, 0);
    const Arrays prior({before}, offset * wide_size);
    const std::size_t out_size = ranks == 0 ? wide_size : size, bytes = count * out_size;
    Bytes expected(bytes);
    resume(expected.data(), with_prior ? before.data() : nullptr, sources.on_host.data(), n, count, ranks);
    const DeviceBytes out(Bytes(bytes + 2 * kGuard + 16, std::byte{0x5a}));
    byte* const to = out.at() + kGuard + offset * out_size;
    call_and_wait([&] {
      space->combine(
          {to, with_prior ? prior.on_device[0] : nullptr, sources.on_device, count, dtype, op, ranks});
    });
    const Bytes got = read_back(to - 1, bytes + 2);
    const DType as = ranks == 0 ? wide_dtype() : dtype;
    EXPECT_EQ(test::first_difference(as, got.data() + 1, expected.data(), count), -1)
        << n << " sources of " << count << ", offset " << offset << (with_prior ? ", after a prior" : "")
        << (wild ? ", wild" : "") << ", for " << ranks << " ranks";
    EXPECT_EQ(got.front(), std::byte{0x5a});
    EXPECT_EQ(got.back(), std::byte{0x5a});
  }
};
INSTANTIATE_TEST_SUITE_P(All, Sums, testing::ValuesIn(test::kinds(Memory::device)),
                         [](const auto& info) { return test::name_of(info.param); });

TEST_P(Sums, HaveTheHostsBits) {
  for (const std::size_t count : {0, 1, 33, 5003})
    for (const int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 70})
      for (const std::size_t offset : {0, 1})
        for (const bool with_prior : {false, true})
          for (const int ranks : {0, n, 3 * n})
            expect_hosts_bits(count, n, offset, with_prior, ranks,
                              (count + static_cast<std::size_t>(n)) % 2 == 0);
}

TEST_P(Sums, LargerThanTheGrid) {
  const std::size_t count = (std::size_t{8} << 20) / size + 3;  // more words of 16 bytes than threads
  for (const std::size_t offset : {0, 1})
    for (const bool with_prior : {false, true})
      for (const int ranks : {0, 3}) expect_hosts_bits(count, 2, offset, with_prior, ranks, with_prior);
}

TEST_P(Sums, FinishAPriorWithoutSources) {
  for (const int ranks : {0, 5}) expect_hosts_bits(1003, 0, 0, true, ranks, false);
}

TEST_P(Sums, WorkInPlace) {
  constexpr std::size_t kCount = 5003;
  const Bytes a = numbers(kCount, false, 1), b = numbers(kCount, true, 2);
  const host::Resume resume = host::kernels().resume[static_cast<int>(dtype)][static_cast<int>(op)];
  for (const bool of_first : {true, false}) {
    const Arrays sources({a, b}, 0);
    Bytes expected(kCount * size);
    resume(expected.data(), nullptr, sources.on_host.data(), 2, kCount, 2);
    byte* const out = const_cast<byte*>(sources.on_device[of_first ? 0 : 1]);
    call_and_wait([&] { space->combine({out, nullptr, sources.on_device, kCount, dtype, op, 2}); });
    const Bytes got = read_back(out, expected.size());
    EXPECT_EQ(test::first_difference(dtype, got.data(), expected.data(), kCount), -1);
  }
  Bytes wide(kCount * wide_size), expected(kCount * wide_size);
  const byte *first = a.data(), *second = b.data();
  resume(wide.data(), nullptr, &first, 1, kCount, 0);
  resume(expected.data(), wide.data(), &second, 1, kCount, 0);
  const Arrays prior({wide}, 0), source({b}, 0);
  byte* const out = const_cast<byte*>(prior.on_device[0]);
  call_and_wait([&] { space->combine({out, out, source.on_device, kCount, dtype, op, 0}); });
  const Bytes got = read_back(out, expected.size());
  EXPECT_EQ(test::first_difference(wide_dtype(), got.data(), expected.data(), kCount), -1);
}

// Every dtype that has a wire form, with each form, as "bf16_int8".
class QuantisedSums : public Gpu, public testing::WithParamInterface<std::tuple<DType, Wire>> {
 protected:
  const DType dtype = std::get<0>(GetParam());
  const Wire as = std::get<1>(GetParam());
  const std::size_t size = size_of(dtype);

  void on_the_host(byte* out, const std::vector<const byte*>& sources, Plain plain, Op op,
                   std::size_t count) {
    const Dst to{out};
    host::kernels().requantise[static_cast<int>(dtype)][static_cast<int>(as)](
        &to, 1, sources.data(), static_cast<int>(sources.size()), plain, op == Op::avg, count);
  }
  // Returns numbers of all magnitudes, a few of them infinite or NaN.
  Bytes elements(std::size_t count, std::uint64_t seed) const {
    std::mt19937_64 random(seed);
    Bytes made(count * size);
    for (std::size_t i = 0; i < count; ++i) {
      const int power = static_cast<int>((i / 64 * 37 + random() % 8) % 276) - 149;
      auto value = static_cast<float>(std::ldexp(static_cast<double>(random() % 1024) / 512 - 1, power));
      if (random() % 4096 == 0) value = random() % 2 ? INFINITY : NAN;
      if (const test::Format* f = test::format_of(dtype))
        test::put(made.data(), i, static_cast<std::uint16_t>(test::encode(*f, value)));
      else test::put(made.data(), i, value);
    }
    return made;
  }
  Bytes on_the_wire(std::size_t count, std::uint64_t seed) {
    const Bytes from = elements(count, seed);
    Bytes coded(wire::bytes_of(count));
    on_the_host(coded.data(), {from.data()}, {.src = 0}, Op::sum, count);
    return coded;
  }
  // Compares scales and codes. The codes of a NaN block mean nothing, and may differ.
  void expect_same_codes(const Bytes& got, const Bytes& expected, std::size_t count,
                         const std::string& what) {
    const std::size_t blocks = wire::blocks_of(count), scales = blocks * wire::kBlock;
    for (std::size_t b = 0; b < blocks; ++b) {
      ASSERT_EQ(got[scales + b], expected[scales + b]) << what << ", block " << b;
      if (expected[scales + b] == static_cast<std::byte>(wire::kNan)) continue;
      for (std::size_t i = b * wire::kBlock; i < (b + 1) * wire::kBlock; ++i)
        ASSERT_EQ(got[i], expected[i]) << what << ", code " << i;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(All, QuantisedSums,
                         testing::Combine(testing::Values(DType::f32, DType::f16, DType::bf16),
                                          testing::Values(Wire::fp8, Wire::int8)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::string(name_of(std::get<1>(info.param)));
                         });

TEST_P(QuantisedSums, ElementsHaveTheHostsBytesThereAndBack) {
  for (const std::size_t count : {0, 1, 31, 32, 33, 10'007, 5'000'011}) {
    for (const std::size_t offset : {0, 1}) {
      const std::string what = std::to_string(count) + " elements, offset " + std::to_string(offset);
      const Arrays input({elements(count, count)}, offset * size);
      const std::size_t bytes = wire::bytes_of(count);
      Bytes expected(bytes), back(count * size);
      on_the_host(expected.data(), input.on_host, {.src = 0}, Op::sum, count);
      on_the_host(back.data(), {expected.data()}, {.dst = 0}, Op::sum, count);
      const DeviceBytes coded(Bytes(bytes + kGuard, std::byte{0x5a}));
      const DeviceBytes out(Bytes(count * size + kGuard, std::byte{0x5a}));
      byte* const to = out.at() + offset * size;
      const byte* const piece = coded.at();
      call_and_wait([&] {
        space->requantise({coded.at(), input.on_device, count, dtype, Op::sum, as, true, false});
        space->requantise({to, {&piece, 1}, count, dtype, Op::sum, as, false, true});
      });
      const Bytes got = read_back(coded.at(), bytes + 1);
      expect_same_codes(got, expected, count, what);
      EXPECT_EQ(got.back(), std::byte{0x5a}) << what;
      const Bytes decoded = read_back(to, count * size + 1);
      EXPECT_EQ(test::first_difference(dtype, decoded.data(), back.data(), count), -1) << what;
      EXPECT_EQ(decoded.back(), std::byte{0x5a}) << what;
    }
  }
}

TEST_P(QuantisedSums, HaveTheHostsBytes) {
  for (const std::size_t count : {1, 33, 10'007})
    for (const int n : {1, 2, 3, 4, 5, 8, 9, 70})
      for (const Op op : {Op::sum, Op::avg}) {
        std::vector<Bytes> coded;
        for (int s = 0; s < n; ++s) coded.push_back(on_the_wire(count, static_cast<std::uint64_t>(s)));
        const Arrays sources(coded, 0);
        Bytes expected(wire::bytes_of(count));
        on_the_host(expected.data(), sources.on_host, {}, op, count);
        const DeviceBytes out(expected.size());
        call_and_wait(
            [&] { space->requantise({out.at(), sources.on_device, count, dtype, op, as, false, false}); });
        expect_same_codes(read_back(out.at(), expected.size()), expected, count,
                          std::to_string(n) + " sources of " + std::to_string(count));
      }
}

TEST_F(Gpu, RefusesSumsWithoutAKernel) {
  const DeviceBytes data(4096);
  const std::vector<const byte*> odd{data.at() + 2};
  const std::vector<const byte*> many(kManySources + 1, data.at());
  space->begin(streams[0]);
  EXPECT_TRUE(test::has(test::text_of<UsageError>(
                            [&] { space->combine({data.at(), nullptr, odd, 4, DType::f32, Op::sum, 1}); }),
                        "no multiple of 4 bytes"));
  EXPECT_TRUE(test::has(test::text_of<UsageError>([&] {
                          space->requantise(
                              {data.at(), odd, 4, DType::f16, Op::sum, Wire::fp8, false, false});
                        }),
                        "no multiple of 16 bytes"));
  EXPECT_TRUE(test::has(test::text_of<UsageError>(
                            [&] { space->combine({data.at(), nullptr, many, 4, DType::f32, Op::sum, 1}); }),
                        "up to 1024 ranks"));
  EXPECT_TRUE(test::has(test::text_of<UsageError>([&] {
                          space->requantise(
                              {data.at(), {many.data(), 1}, 4, DType::i32, Op::sum, Wire::fp8, true, false});
                        }),
                        "leave wire= out"));
  space->end();
  EXPECT_TRUE(test::has(test::text_of<UsageError>([] { make_space(1000); }), "device 1000"));
}

}  // namespace
}  // namespace unisono::cuda
