// Messages between nodes by an MPI, over a small set of its functions: mpi.hpp binds those of the user's own
// mpi.h, Python those of the library that mpi4py has loaded.
//
// MPI's own wait has no deadline. Requests are therefore tested, never waited for.
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "unisono/error.hpp"
#include "unisono/transport.hpp"

namespace unisono {

// Api is copyable, and has
// - Request, Status: MPI's types, or storage for them.
// - isend(data, bytes, rank, tag, Request*), irecv(data, bytes, rank, tag, Request*),
//   test(Request*, int* flag, Status*), get_count(const Status*, int* bytes), recv_from_any(data, bytes,
//   tag), probe_any(tag, int* flag): return MPI's error code, over one communicator on which nothing else
//   sends.
// - running(): returns whether MPI is initialized and not finalized.
// - truncated(code): returns whether a receive was too short.
// - text(code): returns MPI's words.
// - abandon(): hears that MPI may still touch memory of messages that nobody waits for. MPI_Finalize and
//   MPI_Comm_free may then wait for ranks that do not answer.
template <class Api>
class MpiTransport final : public Transport {
 public:
  MpiTransport(Api api, int rank, int size) : api_(std::move(api)), rank_(rank), size_(size) {
    told_->requests.resize(static_cast<std::size_t>(size));
  }

  std::string name() const override { return "MPI"; }

  std::unique_ptr<Pending> exchange(std::span<const Outgoing> sends,
                                    std::span<const Incoming> receives) override {
    require_running();
    auto begun = std::make_unique<Exchange>(*this);
    std::size_t count = 0;
    for (const Incoming& one : receives) count += pieces(one.bytes);
    for (const Outgoing& one : sends) count += pieces(one.bytes);
    begun->open_requests(count);
    for (const Incoming& one : receives)
      begun->post(one.from, static_cast<std::byte*>(one.data), one.bytes, true);
    for (const Outgoing& one : sends)
      begun->post(one.to, const_cast<std::byte*>(static_cast<const std::byte*>(one.data)), one.bytes, false);
    return begun;
  }

  // Sends the text to every rank, once. A rank that waits in `exchange` hears it.
  void tell(const std::string& failure) noexcept override {
    if (closed_ || !told_ || !api_.running()) return;
    Told& told = *told_.release();  // never freed: MPI may send it later
    failure.copy(told.text.data(), told.text.size() - 1);
    for (int r = 0; r < size_; ++r)
      if (r != rank_)
        api_.isend(told.text.data(), static_cast<int>(told.text.size()), r, kFailureTag,
                   &told.requests[static_cast<std::size_t>(r)]);
    api_.abandon();
  }

  std::optional<std::string> heard() override {
    if (closed_ || !api_.running()) return {};
    int there = 0;
    if (api_.probe_any(kFailureTag, &there) != 0 || !there) return {};
    Text text{};
    if (api_.recv_from_any(text.data(), static_cast<int>(text.size()), kFailureTag) != 0) return {};
    text.back() = '\0';
    return std::string(text.data());
  }

  void close() noexcept override { closed_ = true; }

 private:
  static constexpr int kTag = 1, kFailureTag = 2;
  static constexpr std::size_t kMostBytes = std::size_t{1} << 30;  // of one message: MPI counts in int
  using Text = std::array<char, 1000>;
  using Requests = std::vector<typename Api::Request>;
  struct Told {
    Text text{};
    Requests requests;
  };

  static std::size_t pieces(std::size_t bytes) { return (bytes + kMostBytes - 1) / kMostBytes; }
  void require_running() const {
    if (!api_.running())
      throw ResourceError(
          "MPI has been finalized, but a communicator over it is in use: close the communicator "
          "before MPI_Finalize.");
  }

  class Exchange final : public Pending {
   public:
    explicit Exchange(MpiTransport& transport) : transport_(transport) {}
    ~Exchange() override {
      if (ended_ == messages_.size()) return;
      transport_.api_.abandon();
      (void)requests_.release();  // MPI may write to them later
    }

    void open_requests(std::size_t count) {
      requests_->resize(count);
      messages_.reserve(count);
    }

    void post(int rank, std::byte* data, std::size_t bytes, bool receive) {
      Api& api = transport_.api_;
      for (std::size_t begin = 0; begin < bytes; begin += kMostBytes) {
        const int length = static_cast<int>(std::min(bytes - begin, kMostBytes));
        auto* request = &(*requests_)[messages_.size()];
        const int code = receive ? api.irecv(data + begin, length, rank, kTag, request)
                                 : api.isend(data + begin, length, rank, kTag, request);
        if (code != 0) throw TransportError(rank, api.text(code));
        messages_.push_back({rank, length, receive});
      }
    }

    // In order: a message that has come waits for those before it, which costs nothing.
    bool test() override {
      const Api& api = transport_.api_;
      for (; ended_ < messages_.size(); ++ended_) {
        if (!complete(ended_)) return false;
        const Message& message = messages_[ended_];
        const auto expected = static_cast<std::size_t>(message.bytes);
        if (message.code != 0) {
          if (message.receive && api.truncated(message.code))
            throw TransportError(message.rank, std::nullopt, expected);
          throw TransportError(message.rank, api.text(message.code));
        }
        if (message.moved != message.bytes)
          throw TransportError(message.rank, static_cast<std::size_t>(message.moved), expected);
      }
      return true;
    }

    std::vector<int> open() override {
      std::vector<int> ranks;
      for (std::size_t i = ended_; i < messages_.size(); ++i) {
        const Message& message = messages_[i];
        if (complete(i) && message.code == 0) continue;
        if (std::find(ranks.begin(), ranks.end(), message.rank) == ranks.end()) ranks.push_back(message.rank);
      }
      std::sort(ranks.begin(), ranks.end());
      return ranks;
    }

   private:
    struct Message {
      int rank, bytes;
      bool receive;
      bool over = false;
      int code = 0, moved = 0;  // when over: MPI's error code, and bytes
    };

    // Returns whether message i is over. MPI says only once how a request has ended.
    bool complete(std::size_t i) {
      Message& message = messages_[i];
      if (message.over) return true;
      typename Api::Status status{};
      int over = 0;
      message.code = transport_.api_.test(&(*requests_)[i], &over, &status);
      message.over = over || message.code != 0;
      message.moved = message.bytes;
      if (over && message.code == 0 && message.receive) transport_.api_.get_count(&status, &message.moved);
      return message.over;
    }

    MpiTransport& transport_;
    std::vector<Message> messages_;
    std::unique_ptr<Requests> requests_ = std::make_unique<Requests>();
    std::size_t ended_ = 0;  // from the first on
  };

  Api api_;
  int rank_, size_;
  std::unique_ptr<Told> told_ = std::make_unique<Told>();  // null: it has told
  bool closed_ = false;
};

}  // namespace unisono
