// unisono.Moe: a Moe whose calls take Python arrays. Docstrings are in moe_docstrings.hpp.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "new_array.hpp"
#include "py_communicator.hpp"
#include "unisono/moe.hpp"

namespace unisono::python {

struct PyMoeOptions {
  MoeOptions options;                 // all but the memory
  std::optional<std::string> device;  // cpu or cuda; None: the GPU's if the communicator has one
};

// A routing, and the rows that it has brought, if the host knows them.
struct PyMoeHandle {
  MoeHandle handle;
  std::optional<std::size_t> rows;
};

// A Moe with its communicator, kept by every array of its memory.
struct OwnedMoe {
  OwnedMoe(PyCommunicator& of, const MoeShape& shape, const MoeOptions& options);
  nb::object object;  // the communicator's; it outlives the Moe
  PyCommunicator& communicator;
  Moe moe;
};

// The arrays over a Moe's memory. Its buffers come again call after call: each array is made once.
class MoeArrays {
 public:
  explicit MoeArrays(std::shared_ptr<OwnedMoe> owned) : owned_(std::move(owned)) {}
  // Returns a new view of the memory, of a library.
  nb::object view(const void* data, DType dtype, const Shape& shape, Library library);
  const Moe& moe() const { return owned_->moe; }
  int ranks() const { return owned_->communicator.size(); }

 private:
  struct Made {
    const void* data;
    DType dtype;
    Library library;
    Shape shape;
    nb::object array;
  };
  std::shared_ptr<OwnedMoe> owned_;
  std::vector<Made> made_;
};

// unisono.MoeReceived. An array is made when it is first asked for.
class PyMoeReceived {
 public:
  enum Field {
    x,
    scales,
    topk_idx,
    topk_weights,
    counts,
    offsets,
    source_rows,
    expert_rows,
    row_expert,
    rows,
    dropped,
    kFields
  };

  struct Payload {
    DType dtype;
    Shape shape;  // of a token
  };
  PyMoeReceived(std::shared_ptr<MoeArrays> arrays, MoeReceived received, Payload rows,
                std::vector<Payload> payloads, Library library, nb::object out)
      : arrays_(std::move(arrays)),
        received_(std::move(received)),
        rows_(std::move(rows)),
        payloads_(std::move(payloads)),
        library_(library) {
    fields_[x] = std::move(out);
  }
  template <Field field>
  nb::object get() {
    if (!fields_[field].is_valid()) fields_[field] = make(field);
    return fields_[field];
  }
  nb::object more();
  PyMoeHandle handle() const { return {received_.handle, received_.rows_now}; }
  std::optional<std::size_t> rows_now() const { return received_.rows_now; }

 private:
  nb::object make(Field field) const;

  std::shared_ptr<MoeArrays> arrays_;
  MoeReceived received_;
  Payload rows_;  // of x
  std::vector<Payload> payloads_;
  Library library_;
  std::array<nb::object, kFields> fields_;
  nb::object more_;
};

class PyMoe {
 public:
  using Handle = std::optional<PyMoeHandle>;

  PyMoe(PyCommunicator& communicator, const MoeShape& shape, PyMoeOptions options);
  ~PyMoe();
  PyMoe(const PyMoe&) = delete;
  PyMoe& operator=(const PyMoe&) = delete;

  PyMoeReceived dispatch(nb::object x, nb::object topk_idx, nb::object topk_weights, const Handle& handle,
                         nb::object out, std::optional<long long> max_tokens, nb::handle stream);
  void dispatch_begin(nb::object x, nb::object topk_idx, nb::object topk_weights, const Handle& handle,
                      nb::object out, std::optional<long long> max_tokens, nb::handle stream);
  PyMoeReceived dispatch_end();
  nb::object combine(nb::object y, const PyMoeHandle& handle, nb::object topk_weights, nb::object bias,
                     const nb::object& out, nb::handle stream);
  void combine_begin(nb::object y, const PyMoeHandle& handle, nb::object topk_weights, nb::object bias,
                     const nb::object& out, nb::handle stream);
  nb::object combine_end();

  const PyMoeOptions& options() const { return options_; }
  const Moe& moe() const { return owned_->moe; }
  nb::object communicator() const { return owned_->object; }

 private:
  struct Input;
  struct Output;

  // Returns the array, whose dtype (of a few) and shape the call determines. Throws UsageError for another.
  Array take(nb::handle array, const char* what, std::initializer_list<DType> dtypes, const Shape& shape,
             bool written = false) const;
  void check_memory(const Array& array, const char* what) const;
  template <class Run>
  auto call(const nb::object& stream, void* handle, const Run& run);
  PyMoeReceived received(Input&& input, MoeReceived received);

  std::shared_ptr<OwnedMoe> owned_;
  std::shared_ptr<MoeArrays> arrays_;
  PyMoeOptions options_;
  std::unique_ptr<Input> input_;  // between the begin and the end of a phase
  std::unique_ptr<Output> output_;
};

// Returns the Moe of Communicator.moe.
std::unique_ptr<PyMoe> make_moe(PyCommunicator& communicator, int experts, int top_k, long long hidden,
                                long long max_tokens, nb::handle dtype,
                                const std::optional<PyMoeOptions>& options);

}  // namespace unisono::python
