// Messages between nodes by an MPI, over a small set of its functions: mpi.hpp binds those of the user's own
// mpi.h, Python those of the library that mpi4py has loaded.
//
// MPI's own wait has no deadline. Requests are therefore tested, never waited for.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "unisono/error.hpp"
#include "unisono/transport.hpp"

namespace unisono {

// Api is copyable, and has
// - Request, Status: MPI's types, or storage for them.
// - isend(data, bytes, rank, tag, Request*), irecv(data, bytes, rank, tag, Request*),
//   test(Request*, int* flag, Status*), get_count(const Status*, int* bytes), recv_from_any(data, bytes,
//   tag), probe_any(tag, int* flag, int* source, int* bytes): return MPI's error code, over one communicator
//   on which nothing else sends.
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
  Transport::Records* records() override { return &records_; }

  std::unique_ptr<Pending> exchange(std::span<const Outgoing> sends,
                                    std::span<const Incoming> receives) override {
    require_running();
    auto begun = std::make_unique<Exchange>(*this);
    std::size_t count = 0;
    for (const Incoming& one : receives) count += pieces(one.bytes);
    for (const Outgoing& one : sends) count += pieces(one.bytes);
    begun->open_requests(count);
    for (const Incoming& one : receives)
      begun->post(one.from, kTag, static_cast<std::byte*>(one.data), one.bytes, true);
    for (const Outgoing& one : sends) begun->post(one.to, kTag, data_of(one), one.bytes, false);
    return begun;
  }

  // Sends the text to every rank, once. A rank that waits in `exchange` hears it.
  void tell(const std::string& failure) noexcept override {
    const std::scoped_lock lock(mutex_);
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
    const std::scoped_lock lock(mutex_);
    if (closed_ || !api_.running()) return {};
    int there = 0, source = 0, bytes = 0;
    if (api_.probe_any(kFailureTag, &there, &source, &bytes) != 0 || !there) return {};
    Text text{};
    if (api_.recv_from_any(text.data(), static_cast<int>(text.size()), kFailureTag) != 0) return {};
    text.back() = '\0';
    return std::string(text.data());
  }

  void close() noexcept override {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
  }

 private:
  static constexpr int kTag = 1, kFailureTag = 2, kRecordTag = 3, kLongTag = 4;
  static constexpr std::size_t kMostBytes = std::size_t{1} << 30;  // of one message: MPI counts in int
  using Text = std::array<char, 1000>;
  using Requests = std::vector<typename Api::Request>;
  struct Told {
    Text text{};
    Requests requests;
  };

  static std::byte* data_of(const Outgoing& one) {
    return const_cast<std::byte*>(static_cast<const std::byte*>(one.data));
  }
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

    void post(int rank, int tag, std::byte* data, std::size_t bytes, bool receive) {
      Api& api = transport_.api_;
      for (std::size_t begin = 0; begin < bytes; begin += kMostBytes) {
        const int length = static_cast<int>(std::min(bytes - begin, kMostBytes));
        auto* request = &(*requests_)[messages_.size()];
        const int code = receive ? api.irecv(data + begin, length, rank, tag, request)
                                 : api.isend(data + begin, length, rank, tag, request);
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

  class Records final : public Transport::Records {
   public:
    explicit Records(MpiTransport& transport) : transport_(transport) {}
    // Waits a while for records that MPI has not taken yet. Their receivers may come later than this rank
    // ends.
    ~Records() override {
      using Clock = std::chrono::steady_clock;
      const bool running = transport_.api_.running();
      const auto until = Clock::now() + kParting;
      while (running && holds_records() && Clock::now() < until)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (sent_.empty() && !coming_) return;
      if (running) transport_.api_.abandon();
      for (auto& [rank, all] : sent_)
        for (auto& one : all) (void)one.release();  // MPI may read them later
      (void)coming_.release();
    }

    // Bytes that MPIs send at once, with a head, whatever their receivers do.
    std::size_t most_bytes() const override { return 4000; }
    bool send(int to, std::span<const std::byte> head, std::span<const std::byte> data) override {
      const std::scoped_lock lock(transport_.mutex_);
      transport_.require_running();
      if (transport_.closed_) return false;
      forget_sent();
      const auto found = sent_.find(to);
      if (found != sent_.end() && found->second.size() >= kMostUnderWay) return false;
      auto one = std::make_unique<Record>();
      one->data.assign(head.begin(), head.end());
      one->data.insert(one->data.end(), data.begin(), data.end());
      const Api& api = transport_.api_;
      if (const int code =
              api.isend(one->data.data(), static_cast<int>(one->data.size()), to, kRecordTag, &one->request))
        throw TransportError(to, api.text(code));
      sent_[to].push_back(std::move(one));
      return true;
    }

    std::size_t under_way(int to) override {
      const std::scoped_lock lock(transport_.mutex_);
      transport_.require_running();
      forget_sent();
      const auto found = sent_.find(to);
      return found == sent_.end() ? 0 : found->second.size();
    }

    // Nothing else receives by that tag, so that what was probed is what is received.
    std::optional<int> take(std::vector<std::byte>& record) override {
      const std::scoped_lock lock(transport_.mutex_);
      transport_.require_running();
      if (transport_.closed_) return {};
      forget_sent();
      const Api& api = transport_.api_;
      if (!coming_) {
        int there = 0, bytes = 0;
        if (const int code = api.probe_any(kRecordTag, &there, &source_, &bytes))
          throw ResourceError("MPI does not say what messages have come: " + api.text(code));
        if (!there) return {};
        auto one = std::make_unique<Record>();
        one->data.resize(static_cast<std::size_t>(bytes));
        if (const int code = api.irecv(one->data.data(), bytes, source_, kRecordTag, &one->request))
          throw TransportError(source_, api.text(code));
        coming_ = std::move(one);
      }
      if (!over(*coming_, source_)) return {};
      record = std::move(coming_->data);
      coming_.reset();
      return source_;
    }

    std::unique_ptr<Pending> send_long(const Outgoing& message) override {
      return begin_long(message.to, data_of(message), message.bytes, false);
    }
    std::unique_ptr<Pending> receive_long(const Incoming& message) override {
      return begin_long(message.from, static_cast<std::byte*>(message.data), message.bytes, true);
    }

   private:
    std::unique_ptr<Pending> begin_long(int rank, std::byte* data, std::size_t bytes, bool receive) {
      transport_.require_running();
      auto begun = std::make_unique<Exchange>(transport_);
      begun->open_requests(pieces(bytes));
      begun->post(rank, kLongTag, data, bytes, receive);
      return begun;
    }
    struct Record {
      std::vector<std::byte> data;
      typename Api::Request request{};
    };
    static constexpr std::size_t kMostUnderWay = 16;  // to a rank
    static constexpr std::chrono::milliseconds kParting{500};

    bool over(Record& one, int rank) {
      typename Api::Status status{};
      int flag = 0;
      const Api& api = transport_.api_;
      if (const int code = api.test(&one.request, &flag, &status)) throw TransportError(rank, api.text(code));
      return flag != 0;
    }
    // Returns whether there are records that MPI has not taken. After an error of MPI's nobody waits for
    // them.
    bool holds_records() {
      try {
        forget_sent();
        return !sent_.empty();
      } catch (const TransportError&) { return false; }
    }
    // Drops the records that MPI has sent, in order.
    void forget_sent() {
      for (auto at = sent_.begin(); at != sent_.end();) {
        auto& [rank, all] = *at;
        while (!all.empty() && over(*all.front(), rank)) all.pop_front();
        at = all.empty() ? sent_.erase(at) : std::next(at);
      }
    }

    MpiTransport& transport_;
    std::map<int, std::deque<std::unique_ptr<Record>>> sent_;  // by rank
    std::unique_ptr<Record> coming_;                           // from source_
    int source_ = 0;
  };

  Api api_;
  int rank_, size_;
  std::mutex mutex_;  // of all but exchanges, for threads of messages with tags
  std::unique_ptr<Told> told_ = std::make_unique<Told>();  // null: it has told
  bool closed_ = false;
  Records records_{*this};
};

}  // namespace unisono
