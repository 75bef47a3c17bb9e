// A routing on the host: where this rank's tokens go, and how the rows that come are laid out.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "moe/dims.hpp"

namespace unisono::moe {

// A token row is what a rank receives of a token, whatever its number of experts there. In flat and
// rank_major token rows are the received rows. In expert_major they are numbered as in rank_major, and a
// received row belongs to a pair: a token row and one of its experts.
class Route {
 public:
  explicit Route(const Dims& dims) : dims_(dims) {}

  // A token's experts of one rank.
  struct Hop {
    std::int32_t rank;
    std::int32_t index;        // of the token among this rank's tokens for that rank
    std::int32_t first, last;  // its pairs
  };
  struct Pair {
    std::int32_t expert;  // within its rank
    std::int32_t place;   // in the token's top-k
    std::int32_t row;     // expert_major: the received row at its rank; kDropped: none
  };
  static constexpr std::int32_t kDropped = -1;

  // Reads the tokens' experts. Throws UsageError for an index that is no expert.
  void read(const MoeTokens& tokens);
  // Throws UsageError if the tokens' experts are given, and are not those that were read.
  void check_same(const MoeTokens& tokens) const;

  // The numbers that a rank tells all others: its tokens, then the tokens for each rank, then, with
  // expert_major, the pairs of each expert.
  static std::size_t numbers(const Dims& dims) {
    return 1 + static_cast<std::size_t>(dims.ranks + (dims.expert_major() ? dims.experts : 0));
  }
  void tell(std::span<std::int32_t> numbers) const;
  // Takes what all ranks have told, in rank order, `stride` numbers apart. Lays out what goes and what comes.
  // Throws ResourceError on every rank if one would receive more rows than there is room for, and no row may
  // be dropped. name: of a rank, for that error.
  void lay_out(const std::int32_t* told, std::size_t stride);

  // Returns a token's experts: [top_k], as they were read.
  const std::int32_t* experts(std::size_t token) const { return idx_.data() + token * at(dims_.top_k); }
  std::size_t tokens() const { return begins_.empty() ? 0 : begins_.size() - 1; }
  // Returns the hops of a token, by rank.
  std::span<const Hop> hops(std::size_t token) const {
    return {hops_.data() + begins_[token], hops_.data() + begins_[token + 1]};
  }
  std::span<const Pair> pairs(const Hop& hop) const {
    return {pairs_.data() + hop.first, pairs_.data() + hop.last};
  }
  // Returns how many of this rank's tokens rank `peer` receives. The first ones are received.
  std::size_t sent_to(int peer) const { return sent_[static_cast<std::size_t>(peer)]; }
  bool received(const Hop& hop) const { return static_cast<std::size_t>(hop.index) < sent_to(hop.rank); }
  // Returns the token row at its rank.
  std::size_t row_there(const Hop& hop) const {
    return first_there_[static_cast<std::size_t>(hop.rank)] + static_cast<std::size_t>(hop.index);
  }

  // The tokens that come from each rank, and their first token row.
  std::size_t received_from(int peer) const { return received_[static_cast<std::size_t>(peer)]; }
  std::size_t first_from(int peer) const { return first_here_[static_cast<std::size_t>(peer)]; }
  std::size_t tokens_of(int peer) const { return tokens_of_[static_cast<std::size_t>(peer)]; }
  std::size_t most_tokens() const { return most_tokens_; }

  // Sorts what has come by expert. token_idx: [tokens_held, top_k], the experts of each token row within this
  // rank, or -1. Fills in what follows.
  void sort(const std::int32_t* token_idx);

  // As in MoeReceived.
  std::vector<std::int32_t> counts, offsets, source_rows, expert_rows, row_expert;
  std::int32_t rows = 0, dropped = 0;
  // expert_major: [tokens_held, top_k], the received row of each pair of a token row; kDropped: none.
  std::vector<std::int32_t> pair_rows;

 private:
  void lay_out_tokens(const std::int32_t* told, std::size_t stride);
  void lay_out_pairs(const std::int32_t* told, std::size_t stride);
  void check_room(const std::vector<std::size_t>& needed) const;
  void sort_tokens(const std::int32_t* token_idx);
  void sort_pairs(const std::int32_t* token_idx);

  Dims dims_;
  std::vector<std::int32_t> idx_;  // as read
  std::vector<std::int32_t> begins_;
  std::vector<Hop> hops_;
  std::vector<Pair> pairs_;
  std::vector<std::int32_t> rows_for_, pairs_for_;  // by rank, and by expert of all
  std::vector<std::size_t> sent_, first_there_, received_, first_here_, tokens_of_;
  std::size_t most_tokens_ = 0;
};

}  // namespace unisono::moe
