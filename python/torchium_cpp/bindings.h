// Fills the module torchium_cpp._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchium::python {

void bind_optimizers(pybind11::module_& module);

}  // namespace torchium::python
