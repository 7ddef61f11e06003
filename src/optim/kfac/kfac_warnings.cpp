// What K-FAC's plan warns about, each parameter once.
#include "optim/kfac/fallback_reasons.h"
#include "optim/kfac/kfac_plan.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>

namespace torchium::optim::detail {

std::string KfacPlan::fallback_note(const std::string& names) const {
  return "It takes steps of SGD with momentum for " + names +
         ". report() names all of them; a group with a larger lr or another optimizer may suit "
         "them better";
}

std::string KfacPlan::fallback_warning(const std::string& optimizer, const NamesByKind& names) {
  for (const int64_t i : new_fallback_) {
    warned_.insert(param(i).unsafeGetTensorImpl());
  }
  new_fallback_.clear();
  int64_t preconditioned = 0;
  for (const Layer& layer : layers_) {
    preconditioned += layer.bias >= 0 ? 2 : 1;
  }
  const bool is_used_outside = names.count(kUsedOutside) != 0;
  const bool needs_curvature = names.count(kNoCurvature) != 0;
  return c10::str(
      optimizer, " preconditions ", preconditioned, " of ", considered_, " parameters. ",
      fallback_note(summary(names)),
      is_used_outside ? ". A penalty in the loss uses parameters outside of their "
                        "layers: give it a backward() of its own, or use weight_decay"
                      : "",
      needs_curvature
          ? ". Of a model with several outputs, as heads, give each one that the loss uses an "
            "update_curvature(outputs, loss), "
            "which does not reach layers within torch.utils.checkpoint with use_reentrant=True"
          : "");
}

// Those whose calls in one backward pass had different numbers of samples, with two of these.
std::vector<KfacPlan::OtherSamples> KfacPlan::different_samples() const {
  std::vector<OtherSamples> found;
  for (const Layer& layer : layers_) {
    if (layer.sums != nullptr && layer.sums->different_samples &&
        warned_of_samples_.count(param(layer.weight).unsafeGetTensorImpl()) == 0) {
      const auto [fewer, more] = *layer.sums->different_samples;
      found.push_back({layer.weight, fewer, more});
    }
  }
  return found;
}

// Others with another number of samples in a backward pass than most layers (of two equally
// frequent numbers, than the smaller one), with both numbers.
std::vector<KfacPlan::OtherSamples> KfacPlan::disagreeing_layers() const {
  std::map<int64_t, std::map<int64_t, int64_t>> layers_with;  // by pass and number of samples
  for (const Layer& layer : layers_) {
    if (layer.sums != nullptr) {
      for (const auto& [pass, samples] : layer.sums->samples_of_pass) {
        layers_with[pass][samples] += samples != 0 ? 1 : 0;
      }
    }
  }
  std::map<int64_t, int64_t> of_most;  // by pass
  for (const auto& [pass, counts] : layers_with) {
    of_most[pass] =
        std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
          return a.second < b.second;
        })->first;
  }
  std::vector<OtherSamples> found;
  for (const Layer& layer : layers_) {
    if (layer.sums == nullptr || layer.sums->different_samples ||
        warned_of_disagreement_.count(param(layer.weight).unsafeGetTensorImpl()) != 0) {
      continue;
    }
    const auto& passes = layer.sums->samples_of_pass;
    const auto other = std::find_if(passes.begin(), passes.end(), [&](const auto& entry) {
      return entry.second != 0 && entry.second != of_most[entry.first];
    });
    if (other != passes.end()) {
      found.push_back({layer.weight, other->second, of_most[other->first]});
    }
  }
  return found;
}

bool KfacPlan::has_warnings() const {
  return !new_fallback_.empty() || !new_diagonals_.empty() || !different_samples().empty() ||
         !disagreeing_layers().empty();
}

std::vector<std::string> KfacPlan::new_warnings(const std::string& optimizer,
                                                const std::vector<std::string>& names) {
  std::vector<std::string> warnings;
  const auto warn = [&](const char* before, const NamesByKind& kinds, const char* after) {
    if (!kinds.empty()) {
      warnings.push_back(c10::str(optimizer, " ", before, ": ", summary(kinds), after));
    }
  };
  NamesByKind diagonals, different, disagreeing;
  for (const auto& [i, factor, order] : new_diagonals_) {
    diagonals["a factor " + factor].push_back(c10::str(names[i], " (", order, ")"));
  }
  new_diagonals_.clear();
  for (const auto& [weight, samples, others] : different_samples()) {
    different[c10::str(samples, " and ", others, " samples")].push_back(names[weight]);
    warned_of_samples_.insert(param(weight).unsafeGetTensorImpl());
  }
  for (const auto& [weight, samples, others] : disagreeing_layers()) {
    disagreeing[c10::str(samples, " where other layers have ", others)].push_back(names[weight]);
    warned_of_disagreement_.insert(param(weight).unsafeGetTensorImpl());
  }
  warn("keeps only the diagonal of factors above max_factor_size", diagonals, "");
  warn(
      "takes all calls of a layer in one backward pass as positions of the same samples, but their "
      "batches differ",
      different, ". If a batch goes through the model in parts, call backward() for each part");
  warn("takes dimension 0 of a layer's input as the samples, but layers disagree on their number",
       disagreeing,
       ". G is in proportion to it. Give every layer inputs [batch, ..., features], or set fisher "
       "to "
       "\"mc\" or \"ggn\", which count the samples of the outputs");
  return warnings;
}

}  // namespace torchium::optim::detail
