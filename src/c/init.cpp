// How a program of the C interface makes communicators: by the environment, by a bootstrap of its own, or of
// another one's ranks.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c/arguments.hpp"

using namespace unisono;
using namespace unisono::c;

namespace {

// Ranks that meet by the user's function, which takes as many bytes of every rank.
class CallbackBootstrap final : public Bootstrap {
 public:
  explicit CallbackBootstrap(const unisono_bootstrap& functions) : functions_(functions) {
    const auto [size, rank, ranks, all_gather, user] = functions;
    if (!all_gather)
      throw UsageError("bootstrap->all_gather is null: give the function by which ranks meet.");
    if (rank < 0 || rank >= ranks)
      throw UsageError("bootstrap->rank=" + std::to_string(rank) + " is none of " + std::to_string(ranks) +
                       " ranks: give a number from 0 to num_ranks-1.");
  }
  int rank() const override { return functions_.rank; }
  int size() const override { return functions_.num_ranks; }

  std::vector<std::string> all_gather(const std::string& data) override {
    const auto own = static_cast<std::size_t>(rank()), ranks = static_cast<std::size_t>(size());
    const std::uint64_t mine = data.size();
    std::vector<std::uint64_t> lengths(ranks);
    gather(&mine, sizeof mine, lengths.data());
    const std::uint64_t most = *std::max_element(lengths.begin(), lengths.end());
    if (lengths[own] != mine || most > kMostBytes)
      throw UsageError(
          "bootstrap->all_gather has not brought what the ranks gave, in rank order: see that " +
          std::string("all ranks call it as often, and that `all` has rank r's bytes at r*bytes."));
    std::string padded = data;
    padded.resize(most);
    std::string whole(most * ranks, '\0');
    if (most > 0) gather(padded.data(), most, whole.data());
    std::vector<std::string> all;
    for (std::size_t r = 0; r < ranks; ++r) all.push_back(whole.substr(r * most, lengths[r]));
    return all;
  }

 private:
  static constexpr std::size_t kMostBytes = 1 << 20;  // of a rank, at once
  void gather(const void* mine, std::size_t bytes, void* all) const {
    if (const int error = functions_.all_gather(functions_.user, mine, bytes, all))
      throw ResourceError("bootstrap->all_gather has returned " + std::to_string(error) + " on rank " +
                          std::to_string(rank()) + ": see that every rank calls it and is reached.");
  }
  unisono_bootstrap functions_;
};

Communicator::Options options_of(const unisono_options* from) {
  Communicator::Options options;
  if (!from) return options;
  unisono_options room;
  const unisono_options& given = read(from, room, "options", "unisono_options");
  check_reserved(given.reserved, "options->reserved");
  if (given.timeout_s != 0) options.timeout_s = given.timeout_s;
  if (number<bool>(given.use_gpu, 2, "options->use_gpu", "flag")) options.device = given.device;
  if (number<bool>(given.check, 2, "options->check", "flag")) options.check = true;
  if (given.node) options.node = given.node;
  return options;
}

// make(options): returns the bootstrap.
template <class Make>
int init(const unisono_options* from, unisono_comm** comm, const Make& make) {
  return guarded([&] {
    given(comm, "comm") = nullptr;
    const Communicator::Options options = options_of(from);
    *comm = new unisono_comm{Communicator(make(options), options)};
  });
}

}  // namespace

int unisono_init(const unisono_options* options, unisono_comm** comm) {
  return init(options, comm, [](const Communicator::Options& read) {
    return environment_bootstrap(std::chrono::duration<double>(read.timeout_s.value_or(default_timeout_s())));
  });
}

int unisono_init_by(const unisono_bootstrap* bootstrap, const unisono_options* options, unisono_comm** comm) {
  return init(options, comm, [&](const Communicator::Options&) {
    unisono_bootstrap room;
    return std::make_shared<CallbackBootstrap>(read(bootstrap, room, "bootstrap", "unisono_bootstrap"));
  });
}

int unisono_split(unisono_comm* comm, std::int32_t color, std::int32_t key, unisono_comm** made) {
  return guarded([&] {
    given(made, "made") = nullptr;
    if (auto some = given(comm, "comm").communicator.split(color, key))
      *made = new unisono_comm{std::move(*some)};
  });
}
