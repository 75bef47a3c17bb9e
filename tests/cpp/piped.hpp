// Two processes that meet over pipes, for a communicator.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "processes.hpp"
#include "unisono/bootstrap.hpp"

namespace unisono::test {

struct Piped final : Bootstrap {
  Piped(int me, Pipe& in, Pipe& out) : me_(me), in_(in), out_(out) {}
  int rank() const override { return me_; }
  int size() const override { return 2; }
  std::vector<std::string> all_gather(const std::string& data) override {
    std::array<char, 1024> mine{};
    std::copy(data.begin(), data.end(), mine.begin());
    out_.send(std::pair(data.size(), mine));
    const auto [bytes, text] = in_.receive<std::pair<std::size_t, std::array<char, 1024>>>();
    const std::string other(text.data(), bytes);
    return me_ == 0 ? std::vector{data, other} : std::vector{other, data};
  }
  int me_;
  Pipe &in_, &out_;
};

}  // namespace unisono::test
