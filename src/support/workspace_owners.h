// Who holds memory between calls, for workspace_report().
#pragma once

#include <torchium/memory.h>

#include <functional>
#include <vector>

namespace torchium::detail {

// Lists what `report` returns as long as it lives.
class WorkspaceOwner {
 public:
  using Report = std::function<std::vector<WorkspaceUse>()>;

  explicit WorkspaceOwner(Report report);
  ~WorkspaceOwner();
  WorkspaceOwner(const WorkspaceOwner&) = delete;
  WorkspaceOwner& operator=(const WorkspaceOwner&) = delete;

  std::vector<WorkspaceUse> workspaces() const { return report_(); }

 private:
  Report report_;
};

}  // namespace torchium::detail
