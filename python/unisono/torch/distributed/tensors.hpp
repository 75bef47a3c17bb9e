// Tensors of torch as calls of a Communicator take them.
#pragma once

#include <ATen/ATen.h>

#include <limits>
#include <optional>
#include <string>

#include "backend.hpp"

namespace unisono_torch {

using c10d::ReduceOp;
using unisono::Call;
using unisono::DType;

inline bool plain(const at::Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_cuda()) && tensor.layout() == at::kStrided;
}

inline const at::Tensor& one(const Tensors& tensors, const char* what) {
  TORCH_CHECK(tensors.size() == 1, "unisono: ", what, " takes one tensor, not ", tensors.size(), ".");
  return tensors[0];
}

inline const Tensors& one(const std::vector<Tensors>& lists, std::size_t size, const char* what) {
  TORCH_CHECK(lists.size() == 1, "unisono: ", what, " takes one list of tensors, not ", lists.size(), ".");
  TORCH_CHECK(lists[0].size() == size, "unisono: ", what, " needs a list of ", size, " tensors, not of ",
              lists[0].size(), ".");
  return lists[0];
}

inline void check_alike(const at::Tensor& a, const at::Tensor& b, int64_t times, const char* what) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "unisono: ", what, ": tensors must be of one type, not ",
              a.scalar_type(), " and ", b.scalar_type(), ".");
  TORCH_CHECK(a.numel() == b.numel() * times, "unisono: ", what, ": a tensor has ", a.numel(),
              " elements and must have ", b.numel() * times, ".");
}

inline void check_alike(const Tensors& list, const at::Tensor& with, const char* what) {
  for (const at::Tensor& tensor : list) check_alike(tensor, with, 1, what);
}

// A reduction as the communicator knows it.
struct Sum {
  DType dtype;
  unisono::Op op;
  double factor = 1;  // Call::factor
};

inline std::optional<unisono::Op> op_of(const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM: return unisono::Op::sum;
    case ReduceOp::AVG: return unisono::Op::avg;
    case ReduceOp::PRODUCT: return unisono::Op::prod;
    case ReduceOp::MIN: return unisono::Op::min;
    case ReduceOp::MAX: return unisono::Op::max;
    case ReduceOp::BAND: return unisono::Op::band;
    case ReduceOp::BOR: return unisono::Op::bor;
    case ReduceOp::BXOR: return unisono::Op::bxor;
    default: return std::nullopt;
  }
}

// Returns a reduction of elements of that type. Bools are bytes 0 and 1: a sum is their max, a product their
// min.
inline std::optional<Sum> sum_of(at::ScalarType type, unisono::Op op) {
  using unisono::Op;
  switch (type) {
    case at::kFloat: return Sum{DType::f32, op};
    case at::kDouble: return Sum{DType::f64, op};
    case at::kHalf: return Sum{DType::f16, op};
    case at::kBFloat16: return Sum{DType::bf16, op};
    case at::kChar: return Sum{DType::i8, op};
    case at::kByte: return Sum{DType::u8, op};
    case at::kInt: return Sum{DType::i32, op};
    case at::kLong: return Sum{DType::i64, op};
    case at::kFloat8_e4m3fn: return Sum{DType::f8e4m3, op};
    case at::kComplexFloat:
    case at::kComplexDouble:
      if (op != Op::sum && op != Op::avg) return std::nullopt;
      return Sum{type == at::kComplexFloat ? DType::f32 : DType::f64, op};
    case at::kBool:
      if (op == Op::avg) return std::nullopt;
      return Sum{DType::u8, op == Op::sum ? Op::max : op == Op::prod ? Op::min : op};
    default: return std::nullopt;
  }
}

// Returns the factor of a premultiplied sum. Ranks may differ in it: no route follows from its value.
inline double factor_of(const ReduceOp& op) {
  const auto* own = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(own, "unisono: PREMUL_SUM has no factor: make it by torch.distributed._make_nccl_premul_sum.");
  return own->tensor_factor.defined() ? own->tensor_factor.item<double>() : own->double_factor;
}

// Returns nothing if the reduction is the inner backend's.
inline std::optional<Sum> sum_of(const at::Tensor& tensor, const ReduceOp& with) {
  const std::optional<unisono::Op> op = op_of(with);
  if (!op || !plain(tensor)) return std::nullopt;
  std::optional<Sum> sum = sum_of(tensor.scalar_type(), *op);
  const auto memory = tensor.is_cuda() ? unisono::Memory::device : unisono::Memory::host;
  if (!sum || !has_op(sum->dtype, sum->op, memory)) return std::nullopt;
  if (with.op_ != ReduceOp::PREMUL_SUM) return sum;
  if (!takes_factor(sum->dtype, sum->op, memory)) return std::nullopt;
  sum->factor = factor_of(with);
  return sum;
}

inline std::string kind_of(const at::Tensor& tensor) {
  return c10::str(tensor.layout() == at::kStrided ? "" : "sparse ", tensor.scalar_type(), " on ",
                  tensor.device().type());
}

// Copies have no gradients, and may be to and from tensors of that mode.
using NoGrad = c10::InferenceMode;

inline at::Tensor packed(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  const NoGrad no_grad;
  return tensor.contiguous();
}
inline at::Tensor copy_of(const at::Tensor& tensor) {
  const NoGrad no_grad;
  return tensor.clone();
}

// Returns what a call writes for a tensor: itself if it is contiguous, else a copy that is copied back after
// the call. read: the call reads it too.
inline at::Tensor written(Steps& call, const at::Tensor& tensor, bool read = false) {
  if (tensor.is_contiguous()) return tensor;
  const NoGrad no_grad;
  const at::Tensor copy = read ? packed(tensor) : at::empty(tensor.sizes(), tensor.options());
  call.after([tensor, copy] { tensor.copy_(copy); });
  return copy;
}

// Returns whether the tensors lie one after the other, as parts of one buffer.
inline bool consecutive(const Tensors& tensors) {
  const char* at = nullptr;
  for (const at::Tensor& tensor : tensors) {
    const auto* here = static_cast<const char*>(tensor.const_data_ptr());
    if (!tensor.is_contiguous() || (at && here != at)) return false;
    at = here + tensor.nbytes();
  }
  return true;
}

inline at::Tensor flat_for(const Tensors& tensors) {
  const NoGrad no_grad;
  return at::empty({static_cast<int64_t>(tensors.size()) * tensors[0].numel()}, tensors[0].options());
}
// Returns the tensors as one: a view if they are parts of one buffer, else a copy.
inline at::Tensor flat_of(const Tensors& tensors) {
  int64_t total = 0;
  bool parts = consecutive(tensors);
  for (const at::Tensor& tensor : tensors) {
    total += tensor.numel();
    parts = parts && tensor.is_alias_of(tensors[0]);
  }
  const NoGrad no_grad;
  if (parts) return tensors[0].as_strided({total}, {1});
  Tensors rows;
  for (const at::Tensor& tensor : tensors) rows.push_back(tensor.reshape({-1}));
  return at::cat(rows);
}
inline void unpack(const at::Tensor& flat, const Tensors& to) {
  for (std::size_t i = 0; i < to.size(); ++i)
    to[i].copy_(flat.narrow(0, static_cast<int64_t>(i) * to[i].numel(), to[i].numel()).view(to[i].sizes()));
}

inline constexpr std::ptrdiff_t kNowhere = std::numeric_limits<std::ptrdiff_t>::max();

// Returns whether so many bytes from the input on overlap the output other than at `place`, where a call in
// place has them.
inline bool disturbed(const at::Tensor& input, std::size_t bytes, const at::Tensor& output,
                      std::ptrdiff_t place) {
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  const auto* to = static_cast<const char*>(output.const_data_ptr());
  return from < to + output.nbytes() && to < from + bytes && from - to != place;
}

// Returns the input, or a copy if a call would disturb it.
inline at::Tensor apart(const at::Tensor& input, const at::Tensor& output, std::ptrdiff_t place) {
  const at::Tensor in = packed(input);
  return disturbed(in, in.nbytes(), output, place) ? copy_of(in) : in;
}

inline Call bytes(const void* in, void* out, std::size_t count, int root = 0) {
  return {.in = in, .out = out, .count = count, .dtype = DType::u8, .root = root};
}
inline Call sums(const void* in, void* out, const at::Tensor& tensor, std::size_t parts, const Sum& sum,
                 int root = 0) {
  return {.in = in,
          .out = out,
          .count = tensor.nbytes() / parts / unisono::size_of(sum.dtype),
          .dtype = sum.dtype,
          .op = sum.op,
          .root = root,
          .factor = sum.factor};
}

// A message to a rank, or from one.
struct Message {
  at::Tensor tensor;
  int peer;
  bool sent;
};

// Sends and receives. The k-th message to a rank goes in the k-th exchange, and so does the k-th from it:
// both of its ranks count alike.
void exchange(Steps& call, std::vector<Message> messages);

}  // namespace unisono_torch
