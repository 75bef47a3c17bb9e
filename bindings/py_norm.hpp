// all_reduce_rms_norm and all_reduce_layer_norm of Python arrays. Docstrings are in norm_docstrings.hpp.
#pragma once

#include <optional>
#include <string>

#include "py_communicator.hpp"
#include "unisono/fused.hpp"

namespace unisono::python {

struct PyNormOptions {
  nb::object out = nb::none(), residual_out = nb::none(), scales_out = nb::none();  // None: new arrays
  NormQuant quant = NormQuant::none;
  std::optional<double> scale;
  bool sharded = false;
  NormAlgorithm algorithm = NormAlgorithm::automatic;
};

struct PyNorm {
  using Options = std::optional<PyNormOptions>;
  using Pair = nb::typed<nb::tuple, nb::object, nb::object>;
  static Pair rms(PyCommunicator& communicator, nb::handle x, nb::handle residual, nb::handle weight,
                  double eps, const Options& options, nb::handle stream);
  static Pair layer(PyCommunicator& communicator, nb::handle x, nb::handle residual, nb::handle weight,
                    nb::handle bias, double eps, const Options& options, nb::handle stream);

 private:
  using Collective = void (*)(Communicator&, const NormCall&);
  static Pair run(Collective collective, PyCommunicator& communicator, nb::handle x, nb::handle residual,
                  nb::handle weight, nb::handle bias, double eps, const PyNormOptions& options,
                  nb::handle stream);
};

}  // namespace unisono::python
