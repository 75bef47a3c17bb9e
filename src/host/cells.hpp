// Cells: places for pieces that change hands. A piece goes into a cell that its writer has, and the cell is
// the reader's from then on: ranks that exchange pieces write to lines that their own core has just read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "base/bytes.hpp"

namespace unisono::host {

// The cells that a rank has, and where those of all ranks lie. Used by one thread at a time.
class Cells {
 public:
  static constexpr std::uint8_t kNone = 0;
  // Takes memory for a part of a rank's segment, if it has none yet.
  using Fill = std::function<void(int owner, const byte* part, std::size_t bytes)>;

  // Returns how many cells a rank of so many has at first: one for a piece to each peer, at least `least`,
  // and no more than there are numbers for.
  static std::size_t of_rank(std::size_t ranks, std::size_t least) {
    return ranks == 1 ? 0 : std::min(std::max(ranks - 1, least), kNumbers / ranks);
  }

  // firsts: where each rank's cells lie, `each` of `bytes` bytes.
  Cells(int rank, std::span<byte* const> firsts, std::size_t each, std::size_t bytes, Fill fill)
      : each_(each), bytes_(bytes), fill_(std::move(fill)) {
    cells_.push_back({});  // kNone
    for (std::size_t r = 0; r < firsts.size(); ++r)
      for (std::size_t i = 0; i < each; ++i) {
        if (r == static_cast<std::size_t>(rank)) keep(static_cast<std::uint8_t>(cells_.size()));
        cells_.push_back({.at = firsts[r] + i * bytes});
      }
  }

  bool empty() const { return held_.empty(); }
  bool has(std::uint8_t number) const { return number < cells_.size(); }
  // Returns the cell that this rank has got last, which it has no more. Requires: not empty.
  std::uint8_t take() {
    const std::uint8_t last = held_.back();
    held_.pop_back();
    return last;
  }
  void keep(std::uint8_t number) { held_.push_back(number); }
  // Return the place of a cell: to read what is there, and to write so many bytes.
  const byte* at(std::uint8_t number) const { return cells_[number].at; }
  byte* room(std::uint8_t number, std::size_t bytes) {
    Cell& cell = cells_[number];
    if (bytes > cell.filled) fill(number, cell, bytes);
    return cell.at;
  }

 private:
  static constexpr std::size_t kNumbers = 255;
  static constexpr std::size_t kFilledAtOnce = std::size_t{16} << 10;
  struct Cell {
    byte* at = nullptr;
    std::size_t filled = 0;  // bytes that this rank knows to have memory
  };

  void fill(std::uint8_t number, Cell& cell, std::size_t bytes) {
    const std::size_t whole = std::min(round_up(bytes, kFilledAtOnce), bytes_);
    const auto owner = static_cast<int>((number - 1u) / each_);
    fill_(owner, cell.at + cell.filled, whole - cell.filled);
    cell.filled = whole;
  }

  const std::size_t each_, bytes_;
  const Fill fill_;
  std::vector<Cell> cells_;         // of all ranks, by number: those of rank 0's segment from 1 on
  std::vector<std::uint8_t> held_;  // by this rank, the last one at the end
};

}  // namespace unisono::host
