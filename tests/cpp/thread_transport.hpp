// A transport between threads of one process, for tests of the nodes' protocol. A test can make it fail.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "unisono/transport.hpp"

namespace unisono::test {

// The state that the ranks share: the messages under way between each two, and the failures that ranks have
// told.
struct Post {
  using Message = std::vector<std::byte>;
  std::mutex mutex;
  // By (from, to) and number: the k-th receive takes the k-th message.
  struct Way {
    std::map<std::pair<int, int>, std::map<int, Message>> on_the_way;
    std::map<std::pair<int, int>, int> sent, posted;
  } exchanged, long_ones;
  std::map<int, std::string> told;  // by rank
  std::set<int> closed;             // ranks
  bool breaks = false;              // a rank that closes is lost to its peers, as by TCP
  std::atomic<int> exchanges = 0;   // of all ranks, so far
  bool records_only = false;        // long messages go in records
  std::size_t room = 0;             // records under way between two ranks; 0: no rank has records
  std::map<std::pair<int, int>, std::deque<Message>> records;  // by (from, to)
  std::map<int, std::size_t> bytes;                            // that each rank has sent so far
  std::size_t bytes_of(int rank) {
    const std::scoped_lock lock(mutex);
    return bytes[rank];
  }
};

class ThreadTransport final : public Transport {
 public:
  // fails(n): called at the beginning of this rank's n-th exchange, from 0. Its exception passes through.
  ThreadTransport(std::shared_ptr<Post> post, int rank, std::function<void(int)> fails = {})
      : post_(std::move(post)), rank_(rank), fails_(std::move(fails)) {}

  std::string name() const override { return "threads"; }
  Transport::Records* records() override { return post_->room > 0 ? &records_ : nullptr; }

  std::unique_ptr<Pending> exchange(std::span<const Outgoing> sends,
                                    std::span<const Incoming> receives) override {
    ++post_->exchanges;
    if (fails_) fails_(exchanged_);
    ++exchanged_;
    return begin(post_->exchanged, sends, receives);
  }
  std::unique_ptr<Pending> begin(Post::Way& way, std::span<const Outgoing> sends,
                                 std::span<const Incoming> receives) {
    const std::scoped_lock lock(post_->mutex);
    for (const Outgoing& one : sends) {
      const auto* data = static_cast<const std::byte*>(one.data);
      const std::pair pair(rank_, one.to);
      post_->bytes[rank_] += one.bytes;
      way.on_the_way[pair].emplace(way.sent[pair]++, Post::Message(data, data + one.bytes));
    }
    std::vector<Receive> open;
    for (const Incoming& one : receives) open.push_back({one, way.posted[{one.from, rank_}]++});
    return std::make_unique<Exchange>(*this, way, std::move(open));
  }

  void tell(const std::string& failure) noexcept override {
    const std::scoped_lock lock(post_->mutex);
    post_->told.emplace(rank_, failure);
  }
  std::optional<std::string> heard() override {
    const std::scoped_lock lock(post_->mutex);
    for (const auto& [rank, text] : post_->told)
      if (rank != rank_) return text;
    return {};
  }
  void close() noexcept override {
    const std::scoped_lock lock(post_->mutex);
    post_->closed.insert(rank_);
  }

 private:
  struct Receive {
    Incoming to;
    int number;
  };
  class Exchange final : public Pending {
   public:
    Exchange(ThreadTransport& transport, Post::Way& way, std::vector<Receive> open)
        : transport_(transport), way_(way), open_(std::move(open)) {}
    bool test() override {
      const std::scoped_lock lock(transport_.post_->mutex);
      std::erase_if(open_, [&](const Receive& receive) {
        const Incoming& one = receive.to;
        auto& messages = way_.on_the_way[{one.from, transport_.rank_}];
        const auto found = messages.find(receive.number);
        if (found == messages.end()) {
          if (transport_.post_->breaks && transport_.post_->closed.contains(one.from))
            throw TransportError(one.from, "it has closed");
          return false;
        }
        const Post::Message message = std::move(found->second);
        messages.erase(found);
        if (message.size() != one.bytes) throw TransportError(one.from, message.size(), one.bytes);
        std::memcpy(one.data, message.data(), message.size());
        return true;
      });
      return open_.empty();
    }
    std::vector<int> open() override {
      std::vector<int> ranks;
      for (const Receive& one : open_) ranks.push_back(one.to.from);
      return ranks;
    }

   private:
    ThreadTransport& transport_;
    Post::Way& way_;
    std::vector<Receive> open_;
  };

  class Records final : public Transport::Records {
   public:
    explicit Records(ThreadTransport& transport) : transport_(transport) {}
    bool send(int to, std::span<const std::byte> head, std::span<const std::byte> data) override {
      Post& post = *transport_.post_;
      const std::scoped_lock lock(post.mutex);
      if (post.closed.contains(to)) throw TransportError(to, "it has closed");
      auto& all = post.records[{transport_.rank_, to}];
      if (all.size() >= post.room) return false;
      all.emplace_back(head.begin(), head.end()).insert(all.back().end(), data.begin(), data.end());
      return true;
    }
    std::size_t under_way(int to) override {
      const std::scoped_lock lock(transport_.post_->mutex);
      return transport_.post_->records[{transport_.rank_, to}].size();
    }
    std::optional<int> take(std::vector<std::byte>& record) override {
      Post& post = *transport_.post_;
      const std::scoped_lock lock(post.mutex);
      for (auto& [pair, all] : post.records) {
        if (pair.second != transport_.rank_ || all.empty()) continue;
        record = std::move(all.front());
        all.pop_front();
        return pair.first;
      }
      return {};
    }
    std::unique_ptr<Pending> send_long(const Outgoing& message) override {
      if (transport_.post_->records_only) return {};
      return transport_.begin(transport_.post_->long_ones, {&message, 1}, {});
    }
    std::unique_ptr<Pending> receive_long(const Incoming& message) override {
      if (transport_.post_->records_only) return {};
      return transport_.begin(transport_.post_->long_ones, {}, {&message, 1});
    }

   private:
    ThreadTransport& transport_;
  };

  std::shared_ptr<Post> post_;
  int rank_, exchanged_ = 0;
  std::function<void(int)> fails_;
  Records records_{*this};
};

}  // namespace unisono::test
