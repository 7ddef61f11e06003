#include "gradients/capture/collectives.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string_view>

namespace torchium::gradients::detail {
namespace {

bool is_process_group(const c10::IValue& value) {
  if (!value.isCustomClass()) {
    return false;
  }
  const auto& name = value.toObjectRef().type()->name();
  return name && name->qualifiedName() == "__torch__.torch.classes.c10d.ProcessGroup";
}

}  // namespace

int64_t processes_of(const at::RecordFunction& function) {
  if (std::string_view(function.name()).starts_with("c10d::")) {
    for (const auto& value : function.inputs()) {
      if (is_process_group(value)) {
        return value.toCustomClass<c10d::ProcessGroup>()->getSize();
      }
    }
  }
  return 1;
}

}  // namespace torchium::gradients::detail
