#include "cuda/device/exchange.cuh"

#include "cuda/device/reduction.cuh"
#include "cuda/device/words.cuh"

namespace unisono::cuda {
namespace {

// Combines units word by word, by Words::word(x, words of all ranks).
template <class Words>
struct ByWord {
  template <class Framing, int kMost>
  __device__ static typename Framing::Data combine(const Exchange& x, const typename Framing::Data& own,
                                                   const Packet (&got)[kMost]) {
    typename Framing::Data result;
#pragma unroll
    for (int w = 0; w < Framing::kWords; ++w)
      result.at[w] = Words::word(x, words_of<Framing>(own, got, x.rank, w));
    return result;
  }
};

// By value: a reference would put the words into local memory.
template <int kRanks>
using CombineWords = std::uint64_t (*)(const OfRanks<kRanks>, int ranks);
#define UNISONO_COMBINE_WORDS(T, op) combine_words<T, op, kRanks>
template <int kRanks>
__device__ const CombineWords<kRanks> combiners[kDTypes][kOps] = UNISONO_GPU_TABLE(UNISONO_COMBINE_WORDS);

// The combination of a kernel: looked up in a table, or compiled in.
struct ByTableOfWords : ByWord<ByTableOfWords> {
  template <int kRanks>
  __device__ static std::uint64_t word(const Exchange& x, const OfRanks<kRanks>& of) {
    return combiners<kRanks>[static_cast<int>(x.dtype)][static_cast<int>(x.op)](of, x.ranks);
  }
};
template <class T>
struct Sum : ByWord<Sum<T>> {
  template <int kRanks>
  __device__ static std::uint64_t word(const Exchange& x, const OfRanks<kRanks>& of) {
    return combine_words<T, Op::sum>(of, x.ranks);
  }
};
// Returns the root's words, for a relay.
struct OfRoot : ByWord<OfRoot> {
  template <int kRanks>
  __device__ static std::uint64_t word(const Exchange& x, const OfRanks<kRanks>& of) {
    std::uint64_t found = 0;
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r == x.root) found = of.words[r];
    return found;
  }
};

template <Step step, class Framing>
ExchangeKernel combining(bool whole, int ranks, DType dtype, Op op) {
  if (!whole) return exchange_of_ranks<step, Ragged<Framing>, ByTableOfWords>(ranks);
  if (op == Op::sum && dtype == DType::f32) return exchange_of_ranks<step, Whole<Framing>, Sum<float>>(ranks);
  if (op == Op::sum && dtype == DType::f16) return exchange_of_ranks<step, Whole<Framing>, Sum<F16>>(ranks);
  if (op == Op::sum && dtype == DType::bf16) return exchange_of_ranks<step, Whole<Framing>, Sum<BF16>>(ranks);
  return exchange_of_ranks<step, Whole<Framing>, ByTableOfWords>(ranks);
}
template <Step step, class Framing>
ExchangeKernel moving(bool whole, int ranks) {
  return whole ? exchange_of_ranks<step, Whole<Framing>, OfRoot>(ranks)
               : exchange_of_ranks<step, Ragged<Framing>, OfRoot>(ranks);
}

template <class Framing>
ExchangeKernel of_framing(Step step, bool whole, int ranks, DType dtype, Op op) {
  switch (step) {
    case Step::combine: return combining<Step::combine, Framing>(whole, ranks, dtype, op);
    case Step::two_shot: return combining<Step::two_shot, Framing>(whole, ranks, dtype, op);
    case Step::relay: return moving<Step::relay, Framing>(whole, ranks);
    default: return moving<Step::move, Framing>(whole, ranks);
  }
}

}  // namespace

ExchangeKernel exchange_kernel(Step step, bool lines, bool whole, int ranks, DType dtype, Op op) {
  return lines ? of_framing<Lines>(step, whole, ranks, dtype, op)
               : of_framing<Packets>(step, whole, ranks, dtype, op);
}

}  // namespace unisono::cuda
