// Which form a norm on GPU memory takes: the faster one of those that were measured, in records of results/.
#include "fused/cuda/norm_form.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/engine.hpp"

namespace unisono::fused {
namespace {

constexpr std::size_t kAllBlocks = cuda::kMostBlocks;

// A call whose arrays nobody reads: they have places alone.
Task task_of(std::size_t rows, std::size_t hidden, DType dtype, int ranks,
             NormAlgorithm algorithm = NormAlgorithm::automatic, NormQuant quant = NormQuant::none) {
  constexpr std::uintptr_t kApart = std::uintptr_t{1} << 40;
  const auto place = [](std::uintptr_t number) { return reinterpret_cast<void*>(number * kApart); };
  return {host::Norm::rms,
          {.x = place(1),
           .residual = place(2),
           .weight = place(3),
           .out = place(4),
           .residual_out = place(5),
           .scales = place(6),
           .rows = rows,
           .hidden = hidden,
           .dtype = dtype,
           .quant = quant,
           .algorithm = algorithm},
          0,
          ranks};
}

// Ranks that share a GPU each have a part of its blocks.
Gpus gpus_of(int ranks_a_gpu) {
  return {
      .most_blocks = kAllBlocks / static_cast<std::size_t>(ranks_a_gpu), .clusters = true, .nvlink = true};
}

// fused-nvidia-h200-x2/widths.jsonl, its latest run of each case, without those within 3 %.
TEST(NormForm, TwoGpusTakeTheFasterOne) {
  struct Measured {
    DType dtype;
    std::size_t hidden;
    std::vector<std::size_t> one_kernel, apart;  // rows of which each is faster
  };
  using enum DType;
  const std::vector<Measured> measured = {
      {bf16, 2048, {16, 64, 128}, {1024, 4096}},
      {bf16, 2560, {64, 128}, {256, 4096}},
      {bf16, 3584, {64, 128, 512, 2048}, {}},
      {bf16, 4096, {8, 32, 64, 96, 128}, {256, 512, 1024, 2048}},
      {bf16, 5120, {32, 64, 128, 512}, {}},
      {bf16, 6144, {32, 64, 128, 512, 2048}, {}},
      {bf16, 7168, {1, 4, 16, 32, 64, 128, 256, 1024, 4096}, {}},
      {bf16, 8192, {4, 16, 32, 48, 64, 512, 1024}, {}},
      {bf16, 12288, {16, 32, 64, 256, 1024}, {}},
      {bf16, 16384, {8, 16, 24, 32, 64, 256, 1024}, {}},
      {f32, 2048, {8, 32}, {64, 128, 512, 2048}},
      {f32, 2560, {32, 49, 64}, {128, 512, 2048}},
      {f32, 3072, {16, 32, 49, 64}, {96}},
      {f32, 3584, {16, 32, 48, 56, 64}, {256, 1024}},
      {f32, 4096, {4, 16, 24, 32, 48, 63, 64}, {128, 256, 512, 1024}},
      {f32, 5120, {16, 32, 48, 64}, {256, 1024}},
      {f32, 7168, {8, 16, 32, 64}, {}},
      {f32, 8192, {2, 8, 12, 16, 24}, {32, 64, 128, 256, 512}},
  };
  const Plan plan = Plan::of_gpu("NVIDIA H200", 2);
  for (const Measured& one : measured)
    for (const bool in_one : {true, false})
      for (const std::size_t rows : in_one ? one.one_kernel : one.apart) {
        const Task task = task_of(rows, one.hidden, one.dtype, 2);
        const Algorithm planned = plan.choose(Collective::all_reduce_rms_norm, rows * task.row_bytes, false);
        EXPECT_EQ(!runs_apart(algorithm_of(task, gpus_of(1), planned)), in_one)
            << rows << " rows of " << one.hidden << ", " << size_of(one.dtype) << " bytes each";
      }
}

// The last turn of rows may leave most clusters without one. The cases are of
// fused-nvidia-h200-x2/turns.jsonl, without those within 3 %, and without those that docs/notes/fused.md
// names.
TEST(NormForm, TwoGpusOfManyRowsTakeTheFasterOne) {
  struct Measured {
    NormQuant quant;
    DType dtype;
    std::size_t hidden;
    std::vector<std::size_t> one_kernel, apart;  // rows of which each is faster
  };
  using enum DType;
  using enum NormQuant;
  const std::vector<Measured> measured = {
      {none, bf16, 4096, {100, 128}, {133, 160, 192, 208, 256, 264, 330, 362, 396, 480, 1024}},
      {none, bf16, 7168, {100, 128, 208, 256, 330, 362, 480, 1024}, {133, 160, 192, 264, 396}},
      {none, bf16, 8192, {100, 128, 480, 1024}, {133, 160, 192, 264, 396}},
      {none, bf16, 12288, {100, 128, 208, 256, 330, 362, 480, 1024}, {133, 160, 264, 396}},
      {none, bf16, 16384, {100, 128, 208, 256, 362, 480, 1024}, {133, 160, 264, 396}},
      {none, f32, 4096, {}, {100, 128, 133, 160, 192, 208, 256, 264, 330, 362, 396, 480, 1024}},
      {none, f32, 8192, {}, {100, 128, 133, 160, 192, 208, 256, 264, 330, 362, 396, 480, 1024}},
      {fp8_128, bf16, 4096, {100, 128}, {133, 160, 192, 208, 256, 264, 330, 362, 396, 480, 1024}},
      {fp8_128, bf16, 7168, {100, 128, 362, 480, 1024}, {133, 160, 192, 264, 396}},
      {fp8_128, bf16, 8192, {100, 362, 480, 1024}, {133, 160, 192, 264, 396}},
      {fp8_128, bf16, 12288, {100, 128, 208, 256, 480, 1024}, {133, 160, 264, 396}},
      {fp8_128, bf16, 16384, {100, 256, 362, 480, 1024}, {133, 160, 264, 396}},
      {fp8_128, f32, 4096, {}, {100, 128, 133, 160, 192, 208, 256, 264, 330, 362, 396, 480, 1024}},
      {fp8_128, f32, 8192, {}, {100, 128, 133, 160, 192, 208, 256, 264, 330, 362, 396, 480, 1024}},
  };
  for (const Measured& one : measured)
    for (const bool in_one : {true, false})
      for (const std::size_t rows : in_one ? one.one_kernel : one.apart) {
        const Task task = task_of(rows, one.hidden, one.dtype, 2, NormAlgorithm::automatic, one.quant);
        EXPECT_EQ(!runs_apart(algorithm_of(task, gpus_of(1), Algorithm::one_shot_ll128)), in_one)
            << rows << " rows of " << one.hidden << ", " << size_of(one.dtype) << " bytes each, quant "
            << name_of(one.quant);
      }
}

// fused-nvidia-h100-streams/borders-h200.json.
TEST(NormForm, RanksThatShareAGpuTakeTheFasterOne) {
  struct Measured {
    int ranks;
    std::size_t hidden, rows;
    bool one_kernel_is_faster;
  };
  for (const auto& [ranks, hidden, rows, faster] : {Measured{2, 4096, 64, true},
                                                    {2, 4096, 80, false},
                                                    {2, 7168, 32, true},
                                                    {2, 7168, 80, false},
                                                    {2, 7168, 128, false},
                                                    {2, 8192, 32, true},
                                                    {2, 8192, 80, false},
                                                    {2, 16384, 4, true},
                                                    {2, 16384, 48, false},
                                                    {4, 4096, 16, true},
                                                    {4, 4096, 40, false},
                                                    {4, 7168, 16, true},
                                                    {4, 7168, 40, false},
                                                    {4, 8192, 24, false},
                                                    {4, 16384, 8, false},
                                                    {8, 7168, 4, true},
                                                    {8, 7168, 16, false},
                                                    {8, 8192, 12, false},
                                                    {8, 16384, 4, false}})
    EXPECT_EQ(!runs_apart(algorithm_of(task_of(rows, hidden, DType::bf16, ranks), gpus_of(ranks),
                                       Algorithm::one_shot_ll128)),
              faster)
        << ranks << " ranks, " << rows << " rows of " << hidden;
}

// Rows in registers pay where the plan, which knows bytes alone, names the calls apart.
TEST(NormForm, RowsInRegistersPayAgainstThePlan) {
  const Task few = task_of(16, 7168, DType::bf16, 2), many = task_of(80, 7168, DType::bf16, 2);
  EXPECT_EQ(algorithm_of(few, gpus_of(2), Algorithm::two_shot), Algorithm::one_shot_ll128);
  EXPECT_TRUE(runs_apart(algorithm_of(many, gpus_of(2), Algorithm::two_shot)));
  Gpus by_pcie = gpus_of(2);
  by_pcie.nvlink = false;
  EXPECT_EQ(algorithm_of(few, by_pcie, Algorithm::two_shot), Algorithm::two_shot);
}

TEST(NormForm, ACallHasWhatItNames) {
  using enum NormAlgorithm;
  const auto chosen = [](NormAlgorithm named, int ranks) {
    return algorithm_of(task_of(1024, 4096, DType::f32, ranks, named), gpus_of(1), Algorithm::two_shot);
  };
  EXPECT_EQ(chosen(one_shot, 2), Algorithm::one_shot_packets);
  EXPECT_EQ(chosen(one_shot_ll128, 2), Algorithm::one_shot_ll128);
  EXPECT_EQ(chosen(two_shot, 8), Algorithm::two_shot_packets);
  EXPECT_EQ(chosen(two_shot_ll128, 8), Algorithm::two_shot_ll128);
  EXPECT_TRUE(runs_apart(chosen(apart, 2)));
  EXPECT_TRUE(runs_apart(chosen(one_shot, 1))) << "a rank alone sums nothing";
  EXPECT_TRUE(runs_apart(chosen(automatic, cuda::kFewRanks + 1))) << "exchanges are for few ranks";
}

// A quantised call apart needs a place for the sums, which a call in place has not. It is one kernel wherever
// that can run, whatever the plan says.
TEST(NormForm, WhatHasNoPlaceForTheSumsStaysInOneKernel) {
  using enum Algorithm;
  Task task = task_of(1024, 4096, DType::f32, 2, NormAlgorithm::automatic, NormQuant::fp8_128);
  EXPECT_TRUE(can_run_apart(task));
  EXPECT_TRUE(runs_apart(algorithm_of(task, gpus_of(1), one_shot_ll128)));
  task.call.residual_out = const_cast<void*>(task.call.residual);
  EXPECT_FALSE(can_run_apart(task));
  for (const Algorithm planned : {one_shot_packets, one_shot_ll128})
    for (const int ranks_a_gpu : {1, 2})
      EXPECT_EQ(algorithm_of(task, gpus_of(ranks_a_gpu), planned), planned);
  EXPECT_EQ(algorithm_of(task, gpus_of(1), two_shot), one_shot_ll128);
  Gpus by_pcie = gpus_of(1);
  by_pcie.nvlink = false;
  EXPECT_TRUE(runs_apart(algorithm_of(task, by_pcie, two_shot)));
  task.call.quant = NormQuant::none;
  EXPECT_TRUE(can_run_apart(task));
}

// Blocks take all of a row, and no message is longer than a ring has room for.
TEST(NormForm, ACutHasAllOfARow) {
  for (const Algorithm algorithm : {Algorithm::one_shot_packets, Algorithm::one_shot_ll128,
                                    Algorithm::two_shot_packets, Algorithm::two_shot_ll128})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int ranks : {2, 3, 8})
        for (const std::size_t rows : {1, 7, 100, 5000})
          for (const std::size_t hidden : {1, 24, 1023, 1025, 2052, 7168, 8192, 20000}) {
            const Task task = task_of(rows, hidden, dtype, ranks);
            for (const int ranks_a_gpu : {1, ranks}) {
              const Cut cut = cut_of(task, gpus_of(ranks_a_gpu), algorithm);
              std::size_t elements = 0;
              for (unsigned block = 0; block < cut.cluster; ++block)
                elements += gpu::Share(block, cut.bits, static_cast<unsigned>(hidden)).count;
              const std::string where = std::string(name_of(algorithm)) + " of " + std::to_string(ranks) +
                                        " ranks, " + std::to_string(rows) + " rows of " +
                                        std::to_string(hidden);
              EXPECT_EQ(elements, hidden) << where;
              const gpu::Share largest(0, cut.bits, static_cast<unsigned>(hidden));
              EXPECT_GE(cut.messages * cut.piece_bytes, largest.count * size_of(dtype)) << where;
              EXPECT_LE(cut.threads, cuda::kMaxThreads) << where;
              EXPECT_EQ(cut.threads % 32, 0) << where;
              EXPECT_LE(cut.teams * cut.cluster, gpus_of(ranks_a_gpu).most_blocks) << where;
              EXPECT_GE(cut.teams, 1u) << where;
            }
          }
}

}  // namespace
}  // namespace unisono::fused
