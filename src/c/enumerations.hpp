// The enumerations of the C interface: each value has the same number in C++.
#pragma once

#include "unisono/types.hpp"
#include "unisono/unisono.h"

namespace unisono::c {

#define UNISONO_SAME(c, cpp) static_assert(static_cast<int>(c) == static_cast<int>(cpp))
UNISONO_SAME(UNISONO_F32, DType::f32);
UNISONO_SAME(UNISONO_F64, DType::f64);
UNISONO_SAME(UNISONO_F16, DType::f16);
UNISONO_SAME(UNISONO_BF16, DType::bf16);
UNISONO_SAME(UNISONO_I8, DType::i8);
UNISONO_SAME(UNISONO_U8, DType::u8);
UNISONO_SAME(UNISONO_I32, DType::i32);
UNISONO_SAME(UNISONO_I64, DType::i64);
UNISONO_SAME(UNISONO_F8E4M3, DType::f8e4m3);
UNISONO_SAME(UNISONO_F8E5M2, DType::f8e5m2);
UNISONO_SAME(UNISONO_F8E5M2 + 1, kDTypes);
UNISONO_SAME(UNISONO_SUM, Op::sum);
UNISONO_SAME(UNISONO_PROD, Op::prod);
UNISONO_SAME(UNISONO_MIN, Op::min);
UNISONO_SAME(UNISONO_MAX, Op::max);
UNISONO_SAME(UNISONO_AVG, Op::avg);
UNISONO_SAME(UNISONO_BAND, Op::band);
UNISONO_SAME(UNISONO_BOR, Op::bor);
UNISONO_SAME(UNISONO_BXOR, Op::bxor);
UNISONO_SAME(UNISONO_BXOR + 1, kOps);
UNISONO_SAME(UNISONO_WIRE_EXACT, Wire::exact);
UNISONO_SAME(UNISONO_WIRE_FP8, Wire::fp8);
UNISONO_SAME(UNISONO_WIRE_INT8, Wire::int8);
UNISONO_SAME(UNISONO_WIRE_INT8 + 1, kWires);
UNISONO_SAME(UNISONO_HOST, Memory::host);
UNISONO_SAME(UNISONO_DEVICE, Memory::device);
UNISONO_SAME(UNISONO_ALL_REDUCE, Collective::all_reduce);
UNISONO_SAME(UNISONO_REDUCE, Collective::reduce);
UNISONO_SAME(UNISONO_BROADCAST, Collective::broadcast);
UNISONO_SAME(UNISONO_ALL_GATHER, Collective::all_gather);
UNISONO_SAME(UNISONO_GATHER, Collective::gather);
UNISONO_SAME(UNISONO_REDUCE_SCATTER, Collective::reduce_scatter);
UNISONO_SAME(UNISONO_SCATTER, Collective::scatter);
UNISONO_SAME(UNISONO_ALL_TO_ALL, Collective::all_to_all);
UNISONO_SAME(UNISONO_ALL_TO_ALL_V, Collective::all_to_all_v);
UNISONO_SAME(UNISONO_SEND, Collective::send);
UNISONO_SAME(UNISONO_RECV, Collective::recv);
UNISONO_SAME(UNISONO_SEND_RECV, Collective::send_recv);
UNISONO_SAME(UNISONO_BATCH_SEND_RECV, Collective::batch_send_recv);
UNISONO_SAME(UNISONO_BARRIER, Collective::barrier);
#undef UNISONO_SAME

constexpr int kRunnable = UNISONO_BARRIER + 1;  // collectives

}  // namespace unisono::c
