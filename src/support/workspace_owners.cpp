#include "support/workspace_owners.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

namespace torchium {
namespace {

struct OwnerList {
  std::mutex mutex;
  std::set<detail::WorkspaceOwner*> owners;
};

// Never destroyed: owners may outlive it.
OwnerList& all_owners() {
  static auto* list = new OwnerList;
  return *list;
}

}  // namespace

detail::WorkspaceOwner::WorkspaceOwner(Report report) : report_(std::move(report)) {
  const std::scoped_lock lock(all_owners().mutex);
  all_owners().owners.insert(this);
}

detail::WorkspaceOwner::~WorkspaceOwner() {
  const std::scoped_lock lock(all_owners().mutex);
  all_owners().owners.erase(this);
}

std::vector<WorkspaceUse> workspace_report() {
  std::vector<WorkspaceUse> report;
  {
    const std::scoped_lock lock(all_owners().mutex);
    for (const detail::WorkspaceOwner* owner : all_owners().owners) {
      for (WorkspaceUse& use : owner->workspaces()) report.push_back(std::move(use));
    }
  }
  std::ranges::stable_sort(report, [](const WorkspaceUse& a, const WorkspaceUse& b) {
    return a.state_bytes + a.scratch_bytes > b.state_bytes + b.scratch_bytes;
  });
  return report;
}

}  // namespace torchium
