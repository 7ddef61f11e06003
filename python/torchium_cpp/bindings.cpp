#include "bindings.h"

#include <torchium/config.h>

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ objects of Torchium that are not operators on tensors.";
  module.def("version", &torchium::version, "The version of libtorchium.");
  module.def("built_with_cuda", &torchium::built_with_cuda,
             "True if the CUDA kernels of Torchium are in this build.");
  module.def("show_config", &torchium::show_config,
             "Lines of 'name: value': versions, CUDA, BLAS, compiler and build type.");
  torchium::python::bind_optimizers(module);
}
