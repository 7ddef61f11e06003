// torchium/memory.h as operators, without the compiled module `_C`, which exists for one version of
// Python only.
#include <torchium/memory.h>

#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torchium::ops {
namespace {

std::vector<int64_t> memory_info_list(std::optional<c10::Device> device) {
  const MemoryInfo info = memory_info(device);
  return {info.total, info.available,    info.allocated,      info.cached,
          info.arena, info.arena_in_use, info.workspace_limit};
}

std::tuple<int64_t, int64_t, int64_t, int64_t, bool> cuda_memory_info_tuple(
    std::optional<c10::Device> device) {
  const CudaMemoryInfo info = cuda_memory_info(device);
  return {info.total_memory, info.free_memory, info.allocated_memory, info.cached_memory,
          info.available};
}

// One list per member of WorkspaceUse.
std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<int64_t>,
           std::vector<int64_t>, std::vector<int64_t>>
workspace_report_lists() {
  std::vector<std::string> owners, devices;
  std::vector<int64_t> parameters, states, scratch;
  for (const WorkspaceUse& use : workspace_report()) {
    owners.push_back(use.owner);
    devices.push_back(use.device.str());
    parameters.push_back(use.parameters);
    states.push_back(use.state_bytes);
    scratch.push_back(use.scratch_bytes);
  }
  return {owners, devices, parameters, states, scratch};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def("memory_info(Device? device=None) -> int[]", &memory_info_list);
  m.def("cuda_memory_info(Device? device=None) -> (int, int, int, int, bool)",
        &cuda_memory_info_tuple);
  m.def("workspace_report() -> (str[], str[], int[], int[], int[])", &workspace_report_lists);
  m.def("set_workspace_limit(int? bytes) -> ()", &set_workspace_limit);
  m.def("workspace_limit() -> int?", &workspace_limit);
  m.def("release_arenas() -> ()", &release_arenas);
  m.def(
      "efficient_tensor_creation(int[] shape, Device? device=None, ScalarType? dtype=None) -> "
      "Tensor",
      &efficient_tensor_creation);
}

}  // namespace torchium::ops
