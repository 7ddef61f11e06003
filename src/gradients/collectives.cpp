#include "gradients/collectives.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <string_view>

namespace torchium::gradients::detail {
namespace {

constexpr std::string_view kOperators = "c10d::";
constexpr std::string_view kReport = "record_param_comms";

bool is_process_group(const c10::IValue& value) {
  if (!value.isCustomClass()) {
    return false;
  }
  const auto& name = value.toObjectRef().type()->name();
  return name && name->qualifiedName() == "__torch__.torch.classes.c10d.ProcessGroup";
}

}  // namespace

int64_t processes_of(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  if (name.substr(0, kOperators.size()) == kOperators) {
    for (const auto& value : function.inputs()) {
      if (is_process_group(value)) {
        return value.toCustomClass<c10d::ProcessGroup>()->getSize();
      }
    }
  } else if (name == kReport) {
    const auto* reported = dynamic_cast<const torch::ParamCommsDebugInfo*>(
        c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PARAM_COMMS_INFO));
    return reported == nullptr ? 1 : std::max(1, reported->getWorldSize());
  }
  return 1;
}

}  // namespace torchium::gradients::detail
