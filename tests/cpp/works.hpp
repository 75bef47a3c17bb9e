// Calls of ints that begin, and what they give.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <string>

#include "ints.hpp"
#include "ranks.hpp"
#include "unisono/work.hpp"

namespace unisono::test {

inline Ints sums(int ranks, std::size_t count) {
  Ints all(count);
  for (int r = 0; r < ranks; ++r)
    for (std::size_t i = 0; i < count; ++i) all[i] += value(r, i);
  return all;
}
inline Call call_of(const Ints& in, Ints& out, std::size_t count) {
  return {.in = in.data(), .out = out.data(), .count = count, .dtype = DType::i32};
}

template <class E>
std::string error_of(const Work& work) {
  const std::string text = text_of<E>([&] { work.wait(); });
  EXPECT_TRUE(work.done());
  EXPECT_TRUE(work.error());
  return text;
}

// Runs body(comm) on every rank when all have their communicators.
inline void on_ready_ranks(int size, const std::function<void(Communicator&)>& body) {
  std::barrier ready(size);
  on_ranks(size, [&](Communicator& comm) {
    ready.arrive_and_wait();
    body(comm);
  });
}

}  // namespace unisono::test
