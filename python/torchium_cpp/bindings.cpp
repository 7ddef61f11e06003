#include "bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ objects of Torchium that are not operators on tensors.";
  torchium::python::bind_config(module);
  torchium::python::bind_optimizers(module);
}
