// Compiled once for each instruction set, with UNISONO_ISA naming it: the compiler's vectoriser does the rest
// (DESIGN.md, "SIMD", tells why no library is used here).
#include <algorithm>
#include <cstring>

#include "lane/host/move.hpp"
#include "numeric.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono::host::UNISONO_ISA {
namespace {

constexpr std::size_t kBlock =
    4096;  // bytes of a destination that stay in the first-level cache between passes

#if defined(__AVX512F__)
constexpr std::size_t kVector = 64;
inline void stream_vector(byte* to, const byte* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
#elif defined(__AVX2__)
constexpr std::size_t kVector = 32;
inline void stream_vector(byte* to, const byte* from) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#elif defined(__x86_64__)
constexpr std::size_t kVector = 16;
inline void stream_vector(byte* to, const byte* from) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#else
constexpr std::size_t kVector = 16;
inline void stream_vector(byte* to, const byte* from) { std::memcpy(to, from, kVector); }
#endif

// Streaming stores are weakly ordered: whoever signals next must not overtake them.
inline void drain([[maybe_unused]] const Dst* dsts, [[maybe_unused]] int n_dsts) {
#if defined(__x86_64__)
  for (int d = 0; d < n_dsts; ++d)
    if (dsts[d].stream) return _mm_sfence();
#endif
}

void stream(byte* to, const byte* from, std::size_t bytes) {
  const std::size_t head =
      std::min((kVector - reinterpret_cast<std::uintptr_t>(to) % kVector) % kVector, bytes);
  std::memcpy(to, from, head);
  std::size_t i = head;
  for (; i + kVector <= bytes; i += kVector) stream_vector(to + i, from + i);
  std::memcpy(to + i, from + i, bytes - i);
}

void copy(const Dst* dsts, int n_dsts, const byte* src, std::size_t bytes) {
  // several destinations: by blocks, so that the source comes from memory once
  const std::size_t step = n_dsts > 1 ? 4 * kBlock : bytes;
  for (std::size_t at = 0; at < bytes; at += step) {
    const std::size_t some = std::min(step, bytes - at);
    for (int d = 0; d < n_dsts; ++d) {
      if (dsts[d].stream) stream(dsts[d].at + at, src + at, some);
      else std::memcpy(dsts[d].at + at, src + at, some);
    }
  }
  drain(dsts, n_dsts);
}

template <class T>
inline T load(const byte* at, std::size_t i) {
  T value;
  std::memcpy(&value, at + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
inline void store(byte* at, std::size_t i, T value) {
  std::memcpy(at + i * sizeof(T), &value, sizeof(T));
}

// One block of two sources: the pass that most bytes take. `to` is one of them or apart from both, hence
// ivdep.
template <class T, Op op>
void reduce_two(byte* to, const byte* a, const byte* b, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i)
    store<T>(to, i,
             Wide<T>::to(finish<op, T>(
                 combine<op, T>(Wide<T>::from(load<T>(a, i)), Wide<T>::from(load<T>(b, i))), 2)));
}

template <class T, Op op>
void reduce_many(byte* to, const byte* const* srcs, int n_srcs, std::size_t offset, std::size_t count) {
  typename Wide<T>::type wide[kBlock / sizeof(T)];
  for (std::size_t i = 0; i < count; ++i) wide[i] = Wide<T>::from(load<T>(srcs[0] + offset, i));
  for (int s = 1; s < n_srcs; ++s)
    for (std::size_t i = 0; i < count; ++i)
      wide[i] = combine<op, T>(wide[i], Wide<T>::from(load<T>(srcs[s] + offset, i)));
  for (std::size_t i = 0; i < count; ++i) store<T>(to, i, Wide<T>::to(finish<op, T>(wide[i], n_srcs)));
}

// The first destination may be one of the sources: a block is read whole before it is written, element by
// element in order.
template <class T, Op op>
void reduce(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes) {
  alignas(64) byte result[kBlock];
  for (std::size_t at = 0; at < bytes; at += kBlock) {
    const std::size_t some = std::min(kBlock, bytes - at), count = some / sizeof(T);
    byte* first = dsts[0].stream || n_dsts > 1 ? result : dsts[0].at + at;
    if (n_srcs == 2) reduce_two<T, op>(first, srcs[0] + at, srcs[1] + at, count);
    else reduce_many<T, op>(first, srcs, n_srcs, at, count);
    if (first != result) continue;
    for (int d = 0; d < n_dsts; ++d) {
      if (dsts[d].stream) stream(dsts[d].at + at, result, some);
      else std::memcpy(dsts[d].at + at, result, some);
    }
  }
  drain(dsts, n_dsts);
}

template <class T, Op op>
void resume(byte* out, const byte* prior, const byte* const* srcs, int n_srcs, std::size_t count, int ranks) {
  using W = typename Wide<T>::type;
  constexpr std::size_t kStep = kBlock / sizeof(W);
  W wide[kStep];
  for (std::size_t at = 0; at < count; at += kStep) {
    const std::size_t some = std::min(kStep, count - at);
    const std::size_t offset = at * sizeof(T);
    if (prior) std::memcpy(wide, prior + at * sizeof(W), some * sizeof(W));
    else
      for (std::size_t i = 0; i < some; ++i) wide[i] = Wide<T>::from(load<T>(srcs[0] + offset, i));
    for (int s = prior ? 0 : 1; s < n_srcs; ++s)
      for (std::size_t i = 0; i < some; ++i)
        wide[i] = combine<op, T>(wide[i], Wide<T>::from(load<T>(srcs[s] + offset, i)));
    if (ranks == 0) std::memcpy(out + at * sizeof(W), wide, some * sizeof(W));
    else
      for (std::size_t i = 0; i < some; ++i)
        store<T>(out + offset, i, Wide<T>::to(finish<op, T>(wide[i], ranks)));
  }
}

#define UNISONO_OPS(F, T) {F<T, Op::sum>, F<T, Op::prod>, F<T, Op::min>, F<T, Op::max>, F<T, Op::avg>}
#define UNISONO_DTYPES(F)                                                                    \
  {UNISONO_OPS(F, float),        UNISONO_OPS(F, double),       UNISONO_OPS(F, F16),          \
   UNISONO_OPS(F, BF16),         UNISONO_OPS(F, std::int8_t),  UNISONO_OPS(F, std::uint8_t), \
   UNISONO_OPS(F, std::int32_t), UNISONO_OPS(F, std::int64_t), UNISONO_OPS(F, E4M3),         \
   UNISONO_OPS(F, E5M2)}
#define UNISONO_WIDE(T) sizeof(Wide<T>::type)
#define UNISONO_STRING_(x) #x
#define UNISONO_STRING(x) UNISONO_STRING_(x)

}  // namespace

const Kernels kernels = {UNISONO_STRING(UNISONO_ISA),
                         copy,
                         UNISONO_DTYPES(reduce),
                         UNISONO_DTYPES(resume),
                         {UNISONO_WIDE(float), UNISONO_WIDE(double), UNISONO_WIDE(F16), UNISONO_WIDE(BF16),
                          UNISONO_WIDE(std::int8_t), UNISONO_WIDE(std::uint8_t), UNISONO_WIDE(std::int32_t),
                          UNISONO_WIDE(std::int64_t), UNISONO_WIDE(E4M3), UNISONO_WIDE(E5M2)}};

}  // namespace unisono::host::UNISONO_ISA
