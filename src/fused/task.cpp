#include "fused/task.hpp"

#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>

#include "base/scales.hpp"
#include "unisono/error.hpp"

namespace unisono {

std::size_t norm_scale_bytes(NormQuant quant, std::size_t hidden) {
  switch (quant) {
    case NormQuant::fp8_token: return sizeof(float);
    case NormQuant::fp8_128: return scales::blocks_of(hidden) * sizeof(float);
    case NormQuant::mx: return scales::power_bytes_of(hidden);
    default: return 0;
  }
}

namespace fused {
namespace {

void check_numbers(host::Norm kind, const NormCall& call) {
  if (call.dtype != DType::f32 && call.dtype != DType::f16 && call.dtype != DType::bf16)
    throw UsageError("rows of " + std::string(name_of(call.dtype)) +
                     " cannot be normalised: give f32, f16 or bf16.");
  if (call.hidden == 0) throw UsageError("hidden is 0: give rows of at least one element.");
  if (call.rows > std::numeric_limits<std::size_t>::max() / 64 / call.hidden)
    throw UsageError(std::to_string(call.rows) + " rows of " + std::to_string(call.hidden) +
                     " are more than memory can hold: check the numbers.");
  if (!(call.eps >= 0) || !std::isfinite(call.eps))
    throw UsageError("eps is " + std::to_string(call.eps) + ": give a finite number that is not negative.");
  if (call.quant == NormQuant::fp8 &&
      (!(call.scale > 0) || !std::isfinite(1 / call.scale) || !std::isfinite(call.scale)))
    throw UsageError("the scale is " + std::to_string(call.scale) +
                     ": give a positive finite number, whose inverse is finite too.");
  if (kind == host::Norm::rms && call.bias)
    throw UsageError("an RMS norm has no bias: leave it out, or call all_reduce_layer_norm.");
  if (call.sharded && call.algorithm == NormAlgorithm::one_shot)
    throw UsageError("one_shot needs the whole residual on every rank: use two_shot with a sharded one.");
}

struct Span {
  const char* name;
  const void* at;
  std::size_t bytes;
  bool overlaps(const Span& other) const {
    const auto a = reinterpret_cast<std::uintptr_t>(at), b = reinterpret_cast<std::uintptr_t>(other.at);
    return bytes > 0 && other.bytes > 0 && a < b + other.bytes && b < a + bytes;
  }
  bool same(const Span& other) const { return at == other.at && bytes == other.bytes; }
};

void check_memory(const Task& task) {
  const NormCall& call = task.call;
  const std::size_t whole = call.rows * task.row_bytes, held = task.held.count * task.row_bytes;
  const Span x{"x", call.x, whole}, residual{"residual", call.residual, held},
      weight{"weight", call.weight, task.row_bytes}, bias{"bias", call.bias, call.bias ? task.row_bytes : 0},
      out{"out", call.out, call.rows * task.out_bytes}, residual_out{"residual_out", call.residual_out, held},
      scales{"scales", call.scales, call.rows * task.scale_bytes};
  for (const Span& one : {x, residual, weight, out, residual_out, scales})
    if (!one.at && one.bytes > 0)
      throw UsageError(std::string(one.name) + " is missing: " + std::string(task.name()) + " needs it.");
  auto apart = [&](const Span& a, const Span& b, bool may_be_same) {
    if (!a.overlaps(b) || (may_be_same && a.same(b))) return;
    throw UsageError(std::string(a.name) + " overlaps " + b.name + ": give them memory of their own" +
                     (may_be_same ? ", or the same." : "."));
  };
  const bool plain = call.quant == NormQuant::none;
  apart(out, residual_out, false);
  apart(scales, out, false);
  apart(scales, residual_out, false);
  apart(out, x, plain);
  apart(out, residual, plain && !call.sharded);
  apart(residual_out, residual, true);
  apart(residual_out, x, !call.sharded);
  apart(scales, x, false);
  apart(scales, residual, false);
  for (const Span& written : {out, residual_out, scales})
    for (const Span& read : {weight, bias}) apart(written, read, false);
}

}  // namespace

Task::Task(host::Norm of_kind, const NormCall& of_call, int of_rank, int of_ranks)
    : kind(of_kind), call(of_call), rank(of_rank), ranks(of_ranks) {
  check_numbers(kind, call);
  const bool plain = call.quant == NormQuant::none;
  row_bytes = call.hidden * size_of(call.dtype);
  out_bytes = plain ? row_bytes : call.hidden;
  scale_bytes = unisono::norm_scale_bytes(call.quant, call.hidden);
  held = call.sharded ? owned_by(rank) : RowRange{0, call.rows};
  check_memory(*this);
}

Asked::Asked(const Task& task)
    : kind(static_cast<int>(task.kind)),
      dtype(static_cast<int>(task.call.dtype)),
      quant(static_cast<int>(task.call.quant)),
      sharded(task.call.sharded),
      algorithm(static_cast<int>(task.call.algorithm)),
      biased(task.call.bias != nullptr),
      in_place(task.call.memory == Memory::device && task.call.quant != NormQuant::none &&
               task.call.residual_out == task.call.residual),
      eps(task.call.eps),
      scale(task.call.quant == NormQuant::fp8 ? task.call.scale : 0),
      rows(task.call.rows),
      hidden(task.call.hidden) {}

std::string Asked::text() const {
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, ", eps %.9g", static_cast<double>(eps));
  std::string said = kind == 0 ? "all_reduce_rms_norm" : "all_reduce_layer_norm";
  said += " of " + std::to_string(rows) + " x " + std::to_string(hidden) + " " +
          std::string(name_of(static_cast<DType>(dtype))) + numbers;
  if (biased) said += ", with a bias";
  if (in_place) said += ", residual_out is residual";
  if (sharded) said += ", with a sharded residual";
  if (quant) said += ", quant " + std::string(name_of(static_cast<NormQuant>(quant)));
  if (scale != 0) {
    std::snprintf(numbers, sizeof numbers, " by %.9g", static_cast<double>(scale));
    said += numbers;
  }
  if (algorithm) said += ", by " + std::string(name_of(static_cast<NormAlgorithm>(algorithm)));
  return said;
}

std::uint32_t Asked::mark() const {
  std::uint64_t hash = 0x9e3779b97f4a7c15u;
  const auto add = [&](std::uint64_t field) { hash = (hash ^ field) * 0xff51afd7ed558ccdu; };
  for (const int field : std::initializer_list<int>{kind, dtype, quant, sharded, algorithm, biased, in_place})
    add(static_cast<std::uint64_t>(field));
  add(std::bit_cast<std::uint32_t>(eps));
  add(std::bit_cast<std::uint32_t>(scale));
  add(rows);
  add(hidden);
  return static_cast<std::uint32_t>(hash >> 40) | 1u;
}

}  // namespace fused
}  // namespace unisono
