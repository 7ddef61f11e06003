// What SharedPlans do about failed steps, and report of them.
#include "optim/core/step_status.h"
#include "optim/sharing/shared_plans.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {

// With capturable the others do not wait for the answer, and launch the step.
void SharedPlans::withdraw(c10::Device device) {
  if (torchium::detail::is_capturing(device)) {
    return;
  }
  const c10::DeviceGuard device_guard(device);
  StepFindings findings;
  findings.has_error = true;
  const bool others_go_on = agree(findings, ranks_, {}, device).others_go_on;
  is_broken_ |= is_capturable_ && others_go_on;
}

void SharedPlans::check_not_broken() const {
  TORCH_CHECK(!is_broken_, "rank ", ranks_.rank(),
              " of the process group has raised an error in a step that other ranks have launched; "
              "continue from a checkpoint in new processes");
}

// All ranks learn of them in the next step.
void SharedPlans::take_block_failures(bool wait) {
  while (const auto failure = blocks_.next_failure(wait)) {
    const auto& [group, report] = *failure;
    GroupFindings& found = failures_[group / (rules_->kinds() * kPhases)];
    const int64_t count = report.entries[kConsecutiveRootFailures];
    for (const Parameter& p : parameters_) {
      for (const OwnBlock& own : p.own) {
        if (own.tensor.is_same(report.failed_parameter) && count > found.root_failures) {
          found.root_failures = count;
          found.failed = static_cast<int64_t>(p.index);
        }
      }
    }
  }
}

void SharedPlans::report(const StepFindings& findings) {
  const auto param = [&](size_t group, int64_t index) {
    const auto found = std::ranges::find_if(parameters_, [&](const Parameter& p) {
      return p.group == group && static_cast<int64_t>(p.index) == index;
    });
    return found == parameters_.end() ? at::Tensor() : found->param.tensor();
  };
  for (size_t g = 0; g < findings.groups.size(); ++g) {
    const GroupFindings& found = findings.groups[g];
    const bool is_unfit = !findings.found_inf && found.unfit >= 0;
    if (!findings.found_inf) {
      skips_in_a_row_[g] = is_unfit ? skips_in_a_row_[g] + 1 : 0;
    }
    if (!is_unfit && found.failed < 0) {
      continue;
    }
    StepReport report;
    if (is_unfit) {
      report.skipped = true;
      report.entries[kConsecutiveSkips] = skips_in_a_row_[g];
      report.non_finite_parameter = param(g, found.unfit);
    }
    if (found.failed >= 0) {
      report.entries[kConsecutiveRootFailures] = found.root_failures;
      report.failed_parameter = param(g, found.failed);
    }
    reports_.emplace_back(g, std::move(report));
  }
}

// What capturable steps have left on the device. All ranks must call it.
void SharedPlans::settle_last() {
  check_not_broken();
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device_guard(device_);
  take_block_failures(/*wait=*/true);
  StepFindings own = distributed::findings_of_call("check_errors()");
  own.groups = std::exchange(failures_, std::vector<GroupFindings>(options_.size()));
  const bool has_answer = answer_.message.defined();  // read if all ranks have one
  own.counts = distributed::Hash().add(static_cast<int64_t>(has_answer)).value();
  if (failed_.defined()) {
    own.failure = failed_.item<int64_t>();
    failed_.zero_();  // graphs may write to its memory
  }
  StepFindings findings = agree(own, ranks_, {}, device_);
  distributed::check_failure(findings.failure, ranks_);
  if (findings.same_counts && has_answer) {
    const StepFindings last = distributed::settle_later(answer_, ranks_, names_);
    distributed::check_failure(last.failure, ranks_);
    const at::Tensor skips = answer_.skips.cpu();
    for (size_t g = 0; g < findings.groups.size(); ++g) {
      findings.groups[g].unfit = last.groups[g].unfit;
      skips_in_a_row_[g] = std::max<int64_t>(0, skips[static_cast<int64_t>(g)].item<int64_t>() - 1);
    }
    findings.found_inf = last.found_inf;
  }
  report(findings);
}

void SharedPlans::request_reports() {
  blocks_.request_reports();
  if (is_capturable_) {
    settle_last();
  }
}

std::optional<std::pair<size_t, StepReport>> SharedPlans::next_failure(bool) {
  if (reports_.empty()) {
    return std::nullopt;
  }
  auto first = std::move(reports_.front());
  reports_.pop_front();
  return first;
}

}  // namespace torchium::optim::detail
