// torch.ops.torchium.show_config: build information without the compiled module `_C`, which exists
// for one version of Python only.
#include <torchium/config.h>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def("show_config() -> str", [] { return torchium::show_config(); });
}
