// Copies and reductions, compiled once for each instruction set, which UNISONO_ISA names. The compiler
// vectorises them (DESIGN.md, "SIMD", says why no library is used).
#include <algorithm>
#include <cstring>

#include "base/wire.hpp"
#include "host/lanes.hpp"
#include "host/move.hpp"

namespace unisono::host::UNISONO_ISA {

extern const Rows rows;    // of rows.cpp
extern const Norms norms;  // of norms.cpp

namespace {

// Bytes of a destination that stay in the first-level cache between passes.
constexpr std::size_t kBlock = 4096;
// Bytes at a time to several destinations that all go around the cache. Longer turns keep memory waiting
// (docs/notes/host.md).
constexpr std::size_t kAroundStep = 1024;

inline bool all_stream(const Dst* dsts, int n_dsts) {
  return std::all_of(dsts, dsts + n_dsts, [](const Dst& dst) { return dst.stream; });
}

inline void drain(const Dst* dsts, int n_dsts) {
  for (int d = 0; d < n_dsts; ++d)
    if (dsts[d].stream) return drain();
}

void stream(byte* to, const byte* from, std::size_t bytes) {
  std::size_t i = head_of(to, bytes);
  std::memcpy(to, from, i);
  for (; i + kVector <= bytes; i += kVector) stream_vector(to + i, load<Bytes>(from + i, 0));
  std::memcpy(to + i, from + i, bytes - i);
}

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
void copy_vectors(byte* to, const byte* from, std::size_t bytes) {
  constexpr std::size_t kAtOnce = 4;
  std::size_t i = 0;
  for (; i + kAtOnce * kVector <= bytes; i += kAtOnce * kVector) {
    Bytes some[kAtOnce];
    for (std::size_t v = 0; v < kAtOnce; ++v) some[v] = load<Bytes>(from + i, v);
    for (std::size_t v = 0; v < kAtOnce; ++v) store(to + i, v, some[v]);
    asm volatile("" : : : "memory");  // the compiler makes no memcpy of the loop
  }
  std::memcpy(to + i, from + i, bytes - i);
}
#endif

// Copies. Plain stores fetch each line that another core has before they overwrite it, and pieces of some KiB
// fill the store queue. A string move fetches none (docs/notes/host-rings.md); libc makes one only from 4 KiB
// on. Sanitizers see memcpy alone.
inline void copy_through(byte* to, const byte* from, std::size_t bytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  if (bytes > 1024 && string_moves_crawl(to, reinterpret_cast<std::uintptr_t>(from)))
    return copy_vectors(to, from, bytes);
  if (bytes > 1024 && bytes < 4096) {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

// Writes the same bytes to every destination, at the same place of each.
inline void spread(const Dst* dsts, int n_dsts, std::size_t at, const byte* from, std::size_t bytes) {
  for (int d = 0; d < n_dsts; ++d) {
    if (dsts[d].stream) stream(dsts[d].at + at, from, bytes);
    else copy_through(dsts[d].at + at, from, bytes);
  }
}

void copy(const Dst* dsts, int n_dsts, const byte* src, std::size_t bytes) {
  if (n_dsts == 1 && !dsts[0].stream) return copy_through(dsts[0].at, src, bytes);
  // several destinations: by blocks, so that the source comes from memory once
  const std::size_t step = n_dsts < 2 ? bytes : all_stream(dsts, n_dsts) ? kAroundStep : 4 * kBlock;
  for (std::size_t at = 0; at < bytes; at += step)
    spread(dsts, n_dsts, at, src + at, std::min(step, bytes - at));
  drain(dsts, n_dsts);
}

constexpr std::size_t kParts = 4;  // of a piece that goes abreast

// Calls body(at) for each line of four parts of `part` bytes, in turn: more lines are under way between two
// cores than if they came one after the other. Each part begins elsewhere in its pages, and goes around its
// end, since a load waits for a store that is under way to the same place of another page. Requires: part is
// whole lines.
template <class Body>
inline void abreast(std::size_t part, const Body& body) {
  constexpr std::size_t kSkew = 17 * kLine;
  static_assert(kParts * kSkew <= kAbreastFrom / kParts);
  std::size_t begin[kParts];
  for (std::size_t p = 0; p < kParts; ++p) begin[p] = p * (part + kSkew);
  std::size_t done = 0;
  for (std::size_t last = kParts; last-- > 0; begin[last] -= part)  // until part `last` reaches its end
    for (; done < part - last * kSkew; done += kLine)
#pragma GCC unroll 4
      for (std::size_t p = 0; p < kParts; ++p) body(begin[p] + done);
}

// Copies abreast. Asks for the lines of the destination ahead.
void copy_abreast(const Dst* dsts, int n_dsts, const byte* src, std::size_t bytes) {
  constexpr std::size_t kAhead = 8 * kLine;
  const std::size_t part = bytes / kParts / kLine * kLine;
  if (n_dsts != 1 || dsts[0].stream || bytes < kAbreastFrom) return copy(dsts, n_dsts, src, bytes);
  byte* const dst = dsts[0].at;
  abreast(part, [&](std::size_t at) {
    own(dst + at + kAhead);
    for (std::size_t v = 0; v < kLine / kVector; ++v) store(dst + at, v, load<Bytes>(src + at, v));
  });
  std::memcpy(dst + kParts * part, src + kParts * part, bytes - kParts * part);
}

// Combines N sources in order. Begins with the sums in `wide`, except if these sources are the first. Writes
// to `wide`, or to `to` if they are the last. The compiler knows N, so that a sum stays in a register. `to`
// is one of the sources or apart from all of them, hence ivdep.
template <class T, Op op, int N, bool kFirst, bool kLast>
[[gnu::noinline]] void pass(byte* to, typename Wide<T>::type* wide, const byte* const* srcs, std::size_t at,
                            std::size_t count, int n_srcs) {
  const byte* from[N];
  for (int s = 0; s < N; ++s) from[s] = srcs[s] + at;
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    typename Wide<T>::type sum = kFirst ? Wide<T>::from(load<T>(from[0], i)) : wide[i];
    for (int s = kFirst ? 1 : 0; s < N; ++s) sum = combine<op, T>(sum, Wide<T>::from(load<T>(from[s], i)));
    if constexpr (kLast) store<T>(to, i, Wide<T>::to(finish<op, T>(sum, n_srcs)));
    else wide[i] = sum;
  }
}

// Reduces one block of any number of sources, in passes over the first-level cache.
template <class T, Op op>
void reduce_block(byte* to, const byte* const* srcs, int n_srcs, std::size_t at, std::size_t count) {
  if (n_srcs == 2) return pass<T, op, 2, true, true>(to, nullptr, srcs, at, count, 2);
  if (n_srcs == 4) return pass<T, op, 4, true, true>(to, nullptr, srcs, at, count, 4);
  alignas(64) typename Wide<T>::type wide[kBlock / sizeof(T)];
  pass<T, op, 2, true, false>(nullptr, wide, srcs, at, count, n_srcs);
  int s = 2;
  for (; s + 2 < n_srcs; s += 2) pass<T, op, 2, false, false>(nullptr, wide, srcs + s, at, count, n_srcs);
  if (s + 2 == n_srcs) pass<T, op, 2, false, true>(to, wide, srcs + s, at, count, n_srcs);
  else pass<T, op, 1, false, true>(to, wide, srcs + s, at, count, n_srcs);
}

// Reduces what begins at `at` in the sources, to one place.
template <class T, Op op, bool kAbreast>
void reduce_part(byte* to, const byte* const* srcs, int n_srcs, std::size_t at, std::size_t bytes) {
  std::size_t done = 0;
  if constexpr (Lanes<T>::kAny) {
    if (kAbreast && n_srcs == 2 && bytes >= kAbreastFrom) {
      const std::size_t part = bytes / kParts / kLine * kLine;
      const byte *const first = srcs[0] + at, *const second = srcs[1] + at;
      abreast(part, [&](std::size_t i) { reduce_line<T, op>(to + i, first + i, second + i); });
      done = kParts * part;
    }
    if (bytes >= kLine)  // else fewer than lanes take
      done += reduce_lanes<T, op, false>(to + done, srcs, n_srcs, at + done, (bytes - done) / sizeof(T)) *
              sizeof(T);
  }
  for (; done < bytes; done += kBlock)
    reduce_block<T, op>(to + done, srcs, n_srcs, at + done, std::min(kBlock, bytes - done) / sizeof(T));
}

// Reduces to one destination around the cache, straight from the registers. Returns the bytes done, which may
// be fewer.
template <class T, Op op>
std::size_t reduce_around(byte* to, const byte* const* srcs, int n_srcs, std::size_t bytes) {
  if constexpr (!Lanes<T>::kAny) return 0;
  else {
    const std::size_t head = head_of(to, bytes);
    if (head % sizeof(T) != 0) return 0;
    if (head > 0) reduce_block<T, op>(to, srcs, n_srcs, 0, head / sizeof(T));
    const std::size_t count = (bytes - head) / sizeof(T);
    return head + reduce_lanes<T, op, true>(to + head, srcs, n_srcs, head, count) * sizeof(T);
  }
}

// Sums for several destinations, and those around the cache, are made by parts: the first destination gets
// them, or a place in the cache if it goes around, and the others get copies, made while a part is in the
// cache.
constexpr std::size_t kPart = kAbreastFrom;

// Reduces to destinations of which the first one goes around the cache. [[noinline]]: few calls need the
// room.
template <class T, Op op, bool kAbreast>
[[gnu::noinline]] void reduce_streaming(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                                        std::size_t bytes) {
  alignas(64) byte sums[kPart];
  const std::size_t step = all_stream(dsts, n_dsts) ? kAroundStep : kPart;
  for (std::size_t at = n_dsts == 1 ? reduce_around<T, op>(dsts[0].at, srcs, n_srcs, bytes) : 0; at < bytes;
       at += step) {
    const std::size_t length = std::min(step, bytes - at);
    reduce_part<T, op, kAbreast>(sums, srcs, n_srcs, at, length);
    spread(dsts, n_dsts, at, sums, length);
  }
}

// Reduces to every destination. The first may be a source: each element is read before it is written.
template <class T, Op op, bool kAbreast = false>
void reduce(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes) {
  byte* const first = dsts[0].at;
  if (n_dsts == 1 && !dsts[0].stream) {
    if (n_srcs == 2 && bytes < kLine)  // of a small call, for which the steps below are dear
      return pass<T, op, 2, true, true>(first, nullptr, srcs, 0, bytes / sizeof(T), 2);
    return reduce_part<T, op, kAbreast>(first, srcs, n_srcs, 0, bytes);
  }
  if (dsts[0].stream) {
    reduce_streaming<T, op, kAbreast>(dsts, n_dsts, srcs, n_srcs, bytes);
  } else {
    for (std::size_t at = 0; at < bytes; at += kPart) {
      const std::size_t length = std::min(kPart, bytes - at);
      reduce_part<T, op, kAbreast>(first + at, srcs, n_srcs, at, length);
      spread(dsts + 1, n_dsts - 1, at, first + at, length);
    }
  }
  drain(dsts, n_dsts);
}

// A block in wire form.
template <class Code>
struct Block {
  std::uint8_t codes[wire::kBlock];
  std::uint32_t scale;

  void encode(const float* values) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < wire::kBlock; ++i)
      largest = std::max(largest, numeric::as_bits(values[i]) & 0x7fffffffu);
    scale = wire::scale_of<Code>(largest);
    const float inverse = wire::inverse_of(scale);
    for (std::size_t i = 0; i < wire::kBlock; ++i) codes[i] = Code::encode(values[i] * inverse);
  }
  void decode(float* values) const {
    const float step = wire::step_of(scale);
    for (std::size_t i = 0; i < wire::kBlock; ++i) values[i] = Code::decode(codes[i]) * step;
  }
};

// Copies a block's elements. All blocks except the last have a length that the compiler knows.
template <class T>
inline void copy_elements(void* to, const void* from, std::size_t count) {
  if (count == wire::kBlock) std::memcpy(to, from, wire::kBlock * sizeof(T));
  else std::memcpy(to, from, count * sizeof(T));
}

template <class T, class Code>
void requantise(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, Plain plain, bool average,
                std::size_t count) {
  const std::size_t blocks = wire::blocks_of(count);
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t begin = b * wire::kBlock, length = std::min(wire::kBlock, count - begin);
    Block<Code> block{};
    float values[wire::kBlock], sum[wire::kBlock];
    for (int s = 0; s < n_srcs; ++s) {
      if (s == plain.src) {
        T elements[wire::kBlock] = {};
        copy_elements<T>(elements, srcs[s] + begin * sizeof(T), length);
        for (std::size_t i = 0; i < wire::kBlock; ++i) values[i] = Wide<T>::from(elements[i]);
        block.encode(values);
      } else {
        std::memcpy(block.codes, srcs[s] + begin, wire::kBlock);
        block.scale = static_cast<std::uint32_t>(srcs[s][blocks * wire::kBlock + b]);
      }
      if (n_srcs == 1) break;  // the block goes on as it is
      block.decode(values);
      if (s == 0) std::memcpy(sum, values, sizeof sum);
      else
        for (std::size_t i = 0; i < wire::kBlock; ++i) sum[i] = sum[i] + values[i];
    }
    if (n_srcs > 1) {
      if (average)
        for (float& value : sum) value = value / static_cast<float>(n_srcs);
      block.encode(sum);
    }
    for (int d = 0; d < n_dsts; ++d) {
      if (d == plain.dst) {
        block.decode(values);
        T elements[wire::kBlock];
        for (std::size_t i = 0; i < wire::kBlock; ++i) elements[i] = Wide<T>::to(values[i]);
        copy_elements<T>(dsts[d].at + begin * sizeof(T), elements, length);
      } else {
        std::memcpy(dsts[d].at + begin, block.codes, wire::kBlock);
        dsts[d].at[blocks * wire::kBlock + b] = static_cast<byte>(block.scale);
      }
    }
  }
}

template <class T, Op op>
void resume(byte* out, const byte* prior, const byte* const* srcs, int n_srcs, std::size_t count, int ranks) {
  using W = typename Wide<T>::type;
  constexpr std::size_t kStep = kBlock / sizeof(W);
  W wide[kStep];
  for (std::size_t at = 0; at < count; at += kStep) {
    const std::size_t length = std::min(kStep, count - at);
    const std::size_t offset = at * sizeof(T);
    if (prior) std::memcpy(wide, prior + at * sizeof(W), length * sizeof(W));
    else
      for (std::size_t i = 0; i < length; ++i) wide[i] = Wide<T>::from(load<T>(srcs[0] + offset, i));
    for (int s = prior ? 0 : 1; s < n_srcs; ++s)
      for (std::size_t i = 0; i < length; ++i)
        wide[i] = combine<op, T>(wide[i], Wide<T>::from(load<T>(srcs[s] + offset, i)));
    if (ranks == 0) std::memcpy(out + at * sizeof(W), wide, length * sizeof(W));
    else
      for (std::size_t i = 0; i < length; ++i)
        store<T>(out + offset, i, Wide<T>::to(finish<op, T>(wide[i], ranks)));
  }
}

#define UNISONO_WIRES(T) {nullptr, requantise<T, wire::Fp8>, requantise<T, wire::Int8>}
#define UNISONO_REDUCE(T, op) reduce<T, op>
#define UNISONO_REDUCE_ABREAST(T, op) reduce<T, op, Lanes<T>::kAny>
#define UNISONO_RESUME(T, op) resume<T, op>
#define UNISONO_WIDE(T) sizeof(Wide<T>::type)
#define UNISONO_STRING_(x) #x
#define UNISONO_STRING(x) UNISONO_STRING_(x)

}  // namespace

const Kernels kernels = {UNISONO_STRING(UNISONO_ISA),
                         copy,
                         copy_abreast,
                         UNISONO_TABLE(UNISONO_REDUCE),
                         UNISONO_TABLE(UNISONO_REDUCE_ABREAST),
                         UNISONO_TABLE(UNISONO_RESUME),
                         {UNISONO_WIDE(float), UNISONO_WIDE(double), UNISONO_WIDE(F16), UNISONO_WIDE(BF16),
                          UNISONO_WIDE(std::int8_t), UNISONO_WIDE(std::uint8_t), UNISONO_WIDE(std::int32_t),
                          UNISONO_WIDE(std::int64_t), UNISONO_WIDE(E4M3), UNISONO_WIDE(E5M2)},
                         {UNISONO_WIRES(float), {}, UNISONO_WIRES(F16), UNISONO_WIRES(BF16)},
                         rows,
                         norms};

}  // namespace unisono::host::UNISONO_ISA
