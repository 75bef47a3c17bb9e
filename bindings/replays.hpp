// Calls across nodes that have been made before. What they do between nodes, within them and on this rank has
// been written down by Python (nodes/record.py), and is played here: of a small call Python takes most of the
// time.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arguments.hpp"
#include "mpi_engine.hpp"
#include "py_communicator.hpp"

namespace unisono::python {

// Bytes of the call's input (0), of its output (1) or of scratch (2 and up), which have other addresses each
// time.
struct Span {
  int base;
  std::size_t offset, bytes;
};

class Replays {
 public:
  struct Playing {
    const std::vector<std::byte*>& bases;
    nb::object memory;  // of all of them
    std::vector<MpiEngine::Exchange*> exchanges;
    std::byte* at(const Span& span) const { return bases[static_cast<std::size_t>(span.base)] + span.offset; }
  };
  using Step = std::function<void(Playing&)>;
  struct Message {
    int rank;
    Span span;
  };

  // `inside`: the communicator of this rank's node.
  Replays(PyCommunicator& inside, MpiEngine& engine, int rank, int size)
      : inside_(inside), engine_(engine), rank_(rank), size_(size) {}

  // root: or the destination. source: of a send_recv or recv. Plays the call and gives its result, or
  // NotImplemented where it is not known (or `usual` says that it has more to it): to be made, and so to
  // fail, in the usual way. `self` is this object. What it raises has happened in the middle of the call.
  nb::object run(const nb::object& self, const char* collective, nb::handle x, nb::handle out, nb::handle op,
                 nb::handle root, nb::handle source, nb::handle algorithm, bool usual);
  // Whether the last call was not known, but seen before. If so it may be written down: `scratch` gives a
  // base of its own to each name, `keep` ends that, and the others add a step each.
  bool wanted() const { return wanted_ != nullptr; }
  int scratch(const std::string& name, std::size_t bytes);
  void exchange(std::vector<Message> sends, std::vector<Message> receives);
  void wait(std::size_t exchange);
  void copy(const Span& to, const Span& from);
  void combine(const Span& out, const std::optional<Span>& prior, std::vector<Span> sources, DType dtype,
               Op op, int ranks);
  void move(Collective collective, const std::optional<Span>& in, const std::optional<Span>& out,
            std::size_t count, int root, std::vector<std::size_t> sends, std::vector<std::size_t> receives);
  void pair(const std::optional<Span>& in, const std::optional<Span>& out, int to, int from);
  void batch(std::vector<Message> sends, std::vector<Message> receives);
  void keep();

 private:
  struct Call;
  using Steps = std::vector<Step>;

  nb::object play(const nb::object& self, const Steps& steps, Call& call);

  PyCommunicator& inside_;
  MpiEngine& engine_;
  const int rank_, size_;
  std::unordered_map<std::string, Steps> known_;  // without steps: seen once
  Steps* wanted_ = nullptr;
  Steps written_;
  std::unordered_map<std::string, int> names_;  // of scratch
  std::vector<std::vector<std::byte>> scratch_;
};

}  // namespace unisono::python
