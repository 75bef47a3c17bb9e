// The C interface over the C++ one. No exception leaves it.
#include "unisono/unisono.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "unisono/communicator.hpp"

using namespace unisono;

struct unisono_comm {
  Communicator communicator;
};
struct unisono_buffer {
  Buffer buffer;
};
struct unisono_registration {
  Registration registration;
};
struct unisono_work {
  Work work;
};

namespace {

// Each value of an enumeration of C++ has the same number in C.
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
constexpr int kMemories = UNISONO_DEVICE + 1, kRunnable = UNISONO_BARRIER + 1;

thread_local char last_error[2048] = "";

int failed(int status, const char* text) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", text);
  return status;
}

// Returns the status of `body`, whose exception becomes this thread's last error.
template <class Body>
int guarded(const Body& body) noexcept {
  try {
    body();
    return UNISONO_OK;
  } catch (const UsageError& error) {
    return failed(UNISONO_ERROR_USAGE, error.what());
  } catch (const MismatchError& error) {
    return failed(UNISONO_ERROR_MISMATCH, error.what());
  } catch (const TimeoutError& error) {
    return failed(UNISONO_ERROR_TIMEOUT, error.what());
  } catch (const PeerLostError& error) {
    return failed(UNISONO_ERROR_PEER_LOST, error.what());
  } catch (const ResourceError& error) {
    return failed(UNISONO_ERROR_RESOURCE, error.what());
  } catch (const std::bad_alloc&) {
    return failed(UNISONO_ERROR_RESOURCE, "there is no memory left: free some, or use smaller buffers.");
  } catch (const std::exception& error) { return failed(UNISONO_ERROR_OTHER, error.what()); } catch (...) {
    return failed(UNISONO_ERROR_OTHER, "a callback has thrown an exception: let it return a number.");
  }
}

template <class T>
T& given(T* pointer, const char* name) {
  if (pointer) return *pointer;
  throw UsageError(std::string(name) + " is null: give its address.");
}

// The least bytes of a caller's struct: those of its first version.
template <class T>
constexpr std::size_t kLeast = sizeof(T);
template <>
constexpr std::size_t kLeast<unisono_call> = offsetof(unisono_call, factor);

// Returns a struct of the caller's: fields that its header lacks are 0. type: its name.
template <class T>
T read(const T* from, const char* name, const char* type) {
  constexpr std::size_t kMost = 4096;  // bytes; more is no struct of a later version
  const std::size_t size = given(from, name).size;
  if (size < kLeast<T> || size > kMost)
    throw UsageError(std::string(name) + "->size is " + std::to_string(size) + ": set it to sizeof(" + type +
                     ").");
  const char* const bytes = reinterpret_cast<const char*>(from);
  if (std::any_of(bytes + std::min(size, sizeof(T)), bytes + size, [](char byte) { return byte != 0; }))
    throw UsageError(std::string(name) + " has fields that this library does not know: load the version of " +
                     "Unisono that the program was compiled for, or leave them 0.");
  T known{};
  std::memcpy(&known, from, std::min(size, sizeof(T)));
  return known;
}

template <class E>
E number(std::int32_t value, int values, const char* name, const char* type) {
  if (value >= 0 && value < values) return static_cast<E>(value);
  throw UsageError(std::string(name) + "=" + std::to_string(value) + " is no " + type +
                   ": give one from 0 to " + std::to_string(values - 1) + ".");
}

void check_reserved(std::int32_t value, const char* name) {
  if (value != 0)
    throw UsageError(std::string(name) + "=" + std::to_string(value) + " means nothing yet: set it to 0.");
}

std::span<const std::size_t> counts(const std::size_t* from, const char* name, int ranks) {
  return {&given(from, name), static_cast<std::size_t>(ranks)};
}

// Returns the messages of one direction. make: makes a message of C++.
template <class Made, class T, class Make>
std::vector<Made> messages(const T* from, std::size_t many, const char* name, int ranks, const Make& make) {
  if (many > static_cast<std::size_t>(ranks))
    throw UsageError(std::string("call->num_") + name + "=" + std::to_string(many) + " are too many for " +
                     std::to_string(ranks) + " ranks: give each peer one message, or call it again.");
  std::vector<Made> all;
  if (many > 0) given(from, ("call->" + std::string(name)).c_str());
  for (std::size_t i = 0; i < many; ++i) all.push_back(make(from[i]));
  return all;
}

// Checks a call, and gives it to Communicator::run or `begin` as `to` does: to(arguments of either).
template <class To>
auto dispatch(int ranks, std::int32_t wanted, const unisono_call* from, const To& to) {
  const auto collective = number<Collective>(wanted, kRunnable, "collective", "unisono_collective");
  if (collective == Collective::barrier && !from) return to(collective);
  const unisono_call c = read(from, "call", "unisono_call");
  check_reserved(c.reserved, "call->reserved");
  if (collective == Collective::barrier) return to(collective, Call{.timeout_s = c.timeout_s});
  const Call call{.in = c.in,
                  .out = c.out,
                  .count = c.count,
                  .dtype = number<DType>(c.dtype, kDTypes, "call->dtype", "unisono_dtype"),
                  .op = number<Op>(c.op, kOps, "call->op", "unisono_op"),
                  .root = c.root,
                  .memory = number<Memory>(c.memory, kMemories, "call->memory", "unisono_memory"),
                  .stream = c.stream,
                  .algorithm = c.algorithm ? c.algorithm : "",
                  .wire = number<Wire>(c.wire, kWires, "call->wire", "unisono_wire"),
                  .timeout_s = c.timeout_s,
                  .factor = c.factor == 0 ? 1 : c.factor};
  if (number<bool>(c.tagged, 2, "call->tagged", "flag")) return to(collective, call, c.to, c.from, c.tag);
  switch (collective) {
    case Collective::send:
    case Collective::recv:
    case Collective::send_recv: return to(collective, call, c.to, c.from);
    case Collective::all_to_all_v: {
      const auto sends = counts(c.send_counts, "call->send_counts", ranks);
      return to(call, sends, counts(c.recv_counts, "call->recv_counts", ranks));
    }
    case Collective::batch_send_recv: break;
    default: return to(collective, call);
  }
  const auto sends =
      messages<Outgoing>(c.sends, c.num_sends, "sends", ranks,
                         [](const unisono_outgoing& one) { return Outgoing{one.data, one.bytes, one.to}; });
  const auto receives =
      messages<Incoming>(c.receives, c.num_receives, "receives", ranks,
                         [](const unisono_incoming& one) { return Incoming{one.data, one.bytes, one.from}; });
  return to(call, std::span<const Outgoing>(sends), std::span<const Incoming>(receives));
}

unisono_received as_c(const Received& received) { return {received.bytes, received.source}; }

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
  const unisono_options given = read(from, "options", "unisono_options");
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

const char* unisono_error_text() { return last_error; }

int unisono_version() { return library_version(); }

std::int64_t unisono_query(std::int32_t question) {
  switch (question) {
    case UNISONO_NUM_DTYPES: return kDTypes;
    case UNISONO_NUM_OPS: return kOps;
    case UNISONO_NUM_WIRES: return kWires;
    case UNISONO_NUM_COLLECTIVES: return kRunnable;
    case UNISONO_SIZE_OF_CALL: return sizeof(unisono_call);
    case UNISONO_NUM_GPUS: {
      int gpus = 0;
      guarded([&] { gpus = device_count(); });
      return gpus;
    }
    default: return -1;
  }
}

int unisono_init(const unisono_options* options, unisono_comm** comm) {
  return init(options, comm, [](const Communicator::Options& read) {
    return environment_bootstrap(std::chrono::duration<double>(read.timeout_s.value_or(default_timeout_s())));
  });
}

int unisono_init_by(const unisono_bootstrap* bootstrap, const unisono_options* options, unisono_comm** comm) {
  return init(options, comm, [&](const Communicator::Options&) {
    return std::make_shared<CallbackBootstrap>(read(bootstrap, "bootstrap", "unisono_bootstrap"));
  });
}

int unisono_split(unisono_comm* comm, std::int32_t color, std::int32_t key, unisono_comm** made) {
  return guarded([&] {
    given(made, "made") = nullptr;
    if (auto some = given(comm, "comm").communicator.split(color, key))
      *made = new unisono_comm{std::move(*some)};
  });
}

int unisono_rank(const unisono_comm* comm) {
  int rank = -1;
  guarded([&] { rank = given(comm, "comm").communicator.rank(); });
  return rank;
}

int unisono_size(const unisono_comm* comm) {
  int size = -1;
  guarded([&] { size = given(comm, "comm").communicator.size(); });
  return size;
}

int unisono_run(unisono_comm* comm, std::int32_t collective, const unisono_call* call) {
  return guarded([&] {
    Communicator& of = given(comm, "comm").communicator;
    dispatch(of.size(), collective, call, [&](const auto&... form) {
      if constexpr (sizeof...(form) < 5) return of.run(form...);
      else if (const Received received = of.run(form...); call->received) *call->received = as_c(received);
    });
  });
}

int unisono_begin(unisono_comm* comm, std::int32_t collective, const unisono_call* call,
                  unisono_work** work) {
  return guarded([&] {
    given(work, "work") = nullptr;
    Communicator& of = given(comm, "comm").communicator;
    auto made = std::make_unique<unisono_work>();
    made->work =
        dispatch(of.size(), collective, call, [&](const auto&... form) { return of.begin(form...); });
    *work = made.release();
  });
}

int unisono_wait(const unisono_work* work, double timeout_s) {
  return guarded(
      [&] { given(work, "work").work.wait(timeout_s == 0 ? std::nullopt : std::optional(timeout_s)); });
}

int unisono_done(const unisono_work* work) {
  int done = -1;
  guarded([&] { done = given(work, "work").work.done(); });
  return done;
}

int unisono_then(const unisono_work* work, void (*callback)(void*), void* user) {
  return guarded(
      [&] { given(work, "work").work.then([call = &given(callback, "callback"), user] { call(user); }); });
}

int unisono_work_received(const unisono_work* work, unisono_received* received) {
  return guarded([&] { given(received, "received") = as_c(given(work, "work").work.received()); });
}

void unisono_work_free(unisono_work* work) { delete work; }

int unisono_empty(unisono_comm* comm, std::size_t bytes, std::int32_t memory, unisono_buffer** buffer) {
  return guarded([&] {
    given(buffer, "buffer") = nullptr;
    auto made = std::make_unique<unisono_buffer>();
    made->buffer =
        given(comm, "comm")
            .communicator.empty(bytes, number<Memory>(memory, kMemories, "memory", "unisono_memory"));
    *buffer = made.release();
  });
}

void* unisono_buffer_data(const unisono_buffer* buffer) { return buffer ? buffer->buffer.data() : nullptr; }

void unisono_buffer_free(unisono_buffer* buffer) { delete buffer; }

int unisono_register(unisono_comm* comm, void* data, std::size_t bytes, std::int32_t memory,
                     unisono_registration** registration) {
  return guarded([&] {
    given(registration, "registration") = nullptr;
    auto made = std::make_unique<unisono_registration>();
    made->registration = given(comm, "comm")
                             .communicator.register_memory(
                                 {.data = data,
                                  .bytes = bytes,
                                  .memory = number<Memory>(memory, kMemories, "memory", "unisono_memory")});
    *registration = made.release();
  });
}

int unisono_unregister(unisono_registration* registration) {
  const int status = guarded([&] { given(registration, "registration").registration.close(); });
  if (status != UNISONO_ERROR_USAGE) delete registration;
  return status;
}

int unisono_synchronize(unisono_comm* comm, void* stream) {
  return guarded([&] { given(comm, "comm").communicator.synchronize(stream); });
}

int unisono_failure(unisono_comm* comm) {
  return guarded([&] { given(comm, "comm").communicator.raise_if_failed(); });
}

int unisono_abort(unisono_comm* comm, const char* why) {
  return guarded([&] { given(comm, "comm").communicator.abort(why ? why : ""); });
}

int unisono_close(unisono_comm* comm) {
  return guarded([&] { given(comm, "comm").communicator.close(); });
}

void unisono_free(unisono_comm* comm) { delete comm; }
