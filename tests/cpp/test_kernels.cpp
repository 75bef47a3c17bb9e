// The kernels of every instruction set of this machine, against the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/wire.hpp"
#include "core/backend.hpp"
#include "host/move.hpp"
#include "instruction_sets.hpp"
#include "reference.hpp"

namespace unisono::host {
namespace {

using test::all_kernels;
using test::Bytes;

// Every dtype and op, as "f16 sum".
class Reductions : public testing::TestWithParam<std::pair<DType, Op>> {
 protected:
  const DType dtype = GetParam().first;
  const Op op = GetParam().second;
  const std::size_t size = size_of(dtype);

  // The kernel for pieces, and that for large ones from another core.
  std::array<Reduce, 2> reduces(const Kernels& kernels) const {
    return {kernels.reduce[static_cast<int>(dtype)][static_cast<int>(op)],
            kernels.reduce_abreast[static_cast<int>(dtype)][static_cast<int>(op)]};
  }
  void expect_same(const std::byte* got, const Bytes& expected, const std::string& what) const {
    const std::size_t count = expected.size() / size;
    const long at = test::first_difference(dtype, got, expected.data(), count);
    EXPECT_EQ(at, -1) << what << ", of " << count << " elements";
  }
};
INSTANTIATE_TEST_SUITE_P(All, Reductions, testing::ValuesIn(test::kinds()),
                         [](const auto& info) { return test::name_of(info.param); });

constexpr std::size_t kGuard = 64;

// Sources lie at odd offsets. Plain, streamed and several destinations get the same result, and nothing
// beside them changes.
TEST_P(Reductions, GiveTheReferencesBitsEverywhere) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{3}, std::size_t{67}, 4096 / size + 5,
                                  3 * 4096 / size - 1, kAbreastFrom / size + 5}) {
    for (const int n : {2, 3, 4, 5, 8}) {
      if (count * size >= kAbreastFrom && n > 3) continue;
      const std::size_t bytes = count * size;
      std::vector<Bytes> storage;
      std::vector<const std::byte*> srcs;
      for (int s = 0; s < n; ++s) {
        storage.push_back(test::random_bytes(bytes + kGuard, count * 8 + static_cast<std::size_t>(s)));
        srcs.push_back(storage.back().data() + 2 * s + 1);
      }
      const Bytes expected = test::reduced(dtype, op, srcs, count);
      for (const Kernels* kernels : all_kernels()) {
        for (const bool stream : {false, true}) {
          for (const auto& [n_dsts, off] :
               {std::pair(1, 0), std::pair(1, 8), std::pair(1, 1), std::pair(2, 5), std::pair(3, 0)}) {
            for (const Reduce reduce : reduces(*kernels)) {
              std::vector<Bytes> outs(3, Bytes(bytes + 2 * kGuard, std::byte{0x5a}));
              Dst dsts[3];
              for (int d = 0; d < n_dsts; ++d) {
                // the second of three is like a peer's ring: not streamed
                const bool streams = stream && (n_dsts < 3 || d != 1);
                dsts[d] = {outs[static_cast<std::size_t>(d)].data() + kGuard - 3 * d - off, streams};
              }
              reduce(dsts, n_dsts, srcs.data(), n, bytes);
              const std::string what = std::string(kernels->instruction_set) + (stream ? ", streaming" : "");
              for (int d = 0; d < n_dsts; ++d) {
                expect_same(dsts[d].at, expected, what);
                EXPECT_EQ(dsts[d].at[-1], std::byte{0x5a});
                EXPECT_EQ(dsts[d].at[bytes], std::byte{0x5a});
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(Reductions, WorkInPlaceOfAnySource) {
  const std::size_t count = kAbreastFrom / size + 7, bytes = count * size;
  for (const int n : {2, 4}) {
    for (int own = 0; own < n; ++own) {
      for (const Kernels* kernels : all_kernels()) {
        for (const bool stream : {false, true})
          for (const Reduce reduce : reduces(*kernels)) {
            std::vector<Bytes> inputs;
            std::vector<const std::byte*> srcs;
            for (int s = 0; s < n; ++s)
              inputs.push_back(test::random_bytes(bytes, static_cast<std::size_t>(s)));
            for (const Bytes& input : inputs) srcs.push_back(input.data());
            const Bytes expected = test::reduced(dtype, op, srcs, count);
            const Dst to{inputs[static_cast<std::size_t>(own)].data(), stream};
            reduce(&to, 1, srcs.data(), n, bytes);
            expect_same(to.at, expected,
                        std::string(kernels->instruction_set) + " in place of " + std::to_string(own));
          }
      }
    }
  }
}

class Scalings : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, Scalings, testing::Values(DType::f32, DType::f64, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// The elements have any bits. Arrays lie at odd offsets, and nothing beside them changes.
TEST_P(Scalings, RoundEachProductOnce) {
  const DType dtype = GetParam();
  const std::size_t size = size_of(dtype);
  const double inf = std::numeric_limits<double>::infinity();
  for (const double factor : {0.1, 1.0 / 3, -2.5, 0.0, -0.0, 1e-7, 3e-41, 1e300, inf, std::nan("")})
    for (const std::size_t count : {0, 1, 3, 15, 16, 17, 67, 1025}) {
      const std::size_t bytes = count * size;
      const Bytes source = test::random_bytes(bytes, count + 1);
      const Bytes expected = test::scaled(dtype, source, factor);
      for (const Kernels* kernels : all_kernels())
        for (const std::size_t offset : {0, 1, 8}) {
          Bytes in(bytes + 2 * kGuard, std::byte{0x5a}), out = in;
          std::copy(source.begin(), source.end(), in.begin() + static_cast<long>(offset + 1));
          const Bytes before = in;
          const auto scale = [&](std::byte* to, const std::byte* from) {
            const auto weight = static_cast<float>(factor);
            if (dtype == DType::f64) unisono::scale({to, from, count, dtype, factor});
            else kernels->rows.weigh[static_cast<int>(dtype)](to, &from, &weight, 1, count);
          };
          const auto expect_scaled = [&](const std::byte* at, const char* where) {
            EXPECT_EQ(test::first_difference(dtype, at, expected.data(), count), -1)
                << kernels->instruction_set << ' ' << factor << ' ' << count << where;
            EXPECT_EQ(at[-1], std::byte{0x5a});
            EXPECT_EQ(at[bytes], std::byte{0x5a});
          };
          scale(out.data() + kGuard - offset, in.data() + offset + 1);
          expect_scaled(out.data() + kGuard - offset, "");
          EXPECT_EQ(in, before);
          scale(in.data() + offset + 1, in.data() + offset + 1);
          expect_scaled(in.data() + offset + 1, " in place");
        }
    }
}

std::uintptr_t address(const byte* at) { return reinterpret_cast<std::uintptr_t>(at); }

// Calls body(copy, instruction set) for each way to copy of each instruction set.
template <class Body>
void for_copies(const Body& body) {
  for (const Kernels* kernels : all_kernels())
    for (const Copy copy : {kernels->copy, kernels->copy_abreast}) body(copy, kernels->instruction_set);
}

TEST(Copies, GoToEveryDestinationAtAnyOffset) {
  for_copies([](Copy copy, const char* set) {
    for (const std::size_t bytes : {0, 1, 15, 64, 129, 4095, 16384, 40001}) {
      for (std::size_t offset = 0; offset < 64; offset += 13) {
        const Bytes source = test::random_bytes(bytes + kGuard, bytes);
        for (const int streams : {0, 2, 3}) {  // of the destinations
          std::vector<Bytes> outs(3, Bytes(bytes + 2 * kGuard, std::byte{0x5a}));
          Dst dsts[3];
          for (int d = 0; d < 3; ++d)
            dsts[d] = {outs[static_cast<std::size_t>(d)].data() + offset + d + 1, d >= 3 - streams};
          copy(dsts, 3, source.data() + offset, bytes);
          for (const Dst& dst : dsts) {
            const bool same = std::memcmp(dst.at, source.data() + offset, bytes) == 0;
            EXPECT_TRUE(same) << set << ' ' << bytes;
            EXPECT_EQ(dst.at[-1], std::byte{0x5a});
            EXPECT_EQ(dst.at[bytes], std::byte{0x5a});
          }
        }
      }
    }
  });
}

// Among them are the places where string moves crawl, which go another way.
TEST(Copies, GoToEveryPlaceInAPage) {
  constexpr std::size_t kPage = 4096, kMost = 65600;
  const Bytes source = test::random_bytes(kMost + kPage, 3);
  const Bytes before = test::random_bytes(kMost + 3 * kPage, 4);
  for_copies([&](Copy copy, const char* set) {
    for (const std::size_t ahead : {0, 1, 8, 16, 31, 32, 1088, 4080, 4095})
      for (const std::size_t bytes : {1024, 1025, 4096, 4097, 20000, 32767, 32768, 65536, 65599}) {
        Bytes target = before;
        const byte* const from = source.data() + 5;
        const std::size_t now = (address(target.data()) - address(from)) % kPage;
        byte* const to = target.data() + (ahead + kPage - now) % kPage;
        ASSERT_EQ(string_moves_crawl(to, address(from)), ahead > 0 && ahead < 32);
        const Dst dst{to};
        copy(&dst, 1, from, bytes);
        Bytes expected = before;
        std::copy_n(from, bytes, expected.begin() + (to - target.data()));
        EXPECT_EQ(target, expected) << set << ", " << ahead << ", " << bytes;
      }
  });
}

TEST(Copies, ToNoDestinationDoNothing) {
  const Bytes source(100);
  for_copies([&](Copy copy, const char*) { copy(nullptr, 0, source.data(), source.size()); });
}

TEST(Choice, IsAnInstructionSetOfThisMachine) {
  bool known = false;
  for (const Kernels* one : all_kernels()) known = known || one == &kernels();
  EXPECT_TRUE(known);
}

// Returns the wire form of `values` by its definition. A block's step is the least power of two from 2^-126
// on with which no value rounds past the format's largest number. A block that is not finite has scale 255,
// and its codes mean nothing.
Bytes on_the_wire(const std::vector<double>& values, Wire as) {
  const std::size_t blocks = (values.size() + wire::kBlock - 1) / wire::kBlock;
  Bytes bytes(blocks * (wire::kBlock + 1));
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t begin = b * wire::kBlock, end = std::min(values.size(), begin + wire::kBlock);
    double largest = 0;
    bool finite = true;
    for (std::size_t i = begin; i < end; ++i) {
      largest = std::max(largest, std::fabs(values[i]));
      finite = finite && std::isfinite(values[i]);
    }
    int step = -126;
    while (finite && std::ldexp(largest, -step) >= (as == Wire::int8 ? 127.5 : 464)) ++step;
    bytes[blocks * wire::kBlock + b] = static_cast<std::byte>(finite ? step + 127 : 255);
    for (std::size_t i = begin; finite && i < end; ++i) {
      const double scaled = std::ldexp(values[i], -step);
      bytes[i] = as == Wire::int8 ? static_cast<std::byte>(static_cast<int>(std::nearbyint(scaled)))
                                  : static_cast<std::byte>(test::encode(test::kE4M3, scaled));
    }
  }
  return bytes;
}

// Returns numbers from denormals to the largest, zeros, and a few infinities and NaNs.
std::vector<float> numbers_of_all_magnitudes(std::size_t count) {
  std::mt19937_64 random(count);
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const int power = static_cast<int>((i / 64 * 37 + random() % 8) % 276) - 149;
    values[i] = static_cast<float>(std::ldexp(static_cast<double>(random() % 1024) / 512 - 1, power));
    if (random() % 16 == 0) values[i] = 0;
    if (random() % 2048 == 0) values[i] = random() % 2 ? INFINITY : NAN;
  }
  return values;
}

TEST(Quantised, ElementsAreEncodedAndDecodedByTheDefinition) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{31}, std::size_t{32}, std::size_t{10'007}}) {
    const std::vector<float> values = numbers_of_all_magnitudes(count);
    const std::size_t scales = (count + wire::kBlock - 1) / wire::kBlock * wire::kBlock;
    const auto* src = reinterpret_cast<const std::byte*>(values.data());
    for (const Wire as : {Wire::fp8, Wire::int8}) {
      const Bytes expected = on_the_wire({values.begin(), values.end()}, as);
      auto finite = [&](std::size_t i) { return expected[scales + i / wire::kBlock] != std::byte{255}; };
      for (const Kernels* kernels : all_kernels()) {
        const auto what = std::string(kernels->instruction_set) + " " + std::string(name_of(as));
        const auto requantise = kernels->requantise[static_cast<int>(DType::f32)][static_cast<int>(as)];
        Bytes got(expected.size());
        const Dst to{got.data()};
        requantise(&to, 1, &src, 1, {.src = 0}, false, count);
        for (std::size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE((i < scales && !finite(i)) || got[i] == expected[i]) << what << ", byte " << i;
        std::vector<float> back(count);
        const std::byte* from = got.data();
        const Dst home{reinterpret_cast<std::byte*>(back.data())};
        requantise(&home, 1, &from, 1, {.dst = 0}, false, count);
        for (std::size_t i = 0; i < count; ++i) {
          const auto code = std::to_integer<std::uint8_t>(expected[i]);
          const double read =
              as == Wire::int8 ? static_cast<std::int8_t>(code) : test::decode(test::kE4M3, code);
          const int step = std::to_integer<int>(expected[scales + i / wire::kBlock]) - 127;
          EXPECT_TRUE(finite(i) ? back[i] == static_cast<float>(std::ldexp(read, step)) : std::isnan(back[i]))
              << what << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace unisono::host
