// The hooks that fill the module torchium_cpp._C. Each is defined in a .cpp file of this folder.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchium::python {

void bind_config(pybind11::module_& module);
void bind_optimizers(pybind11::module_& module);

}  // namespace torchium::python
