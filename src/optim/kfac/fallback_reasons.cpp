#include "optim/kfac/fallback_reasons.h"

#include <c10/util/Exception.h>

#include <array>
#include <string_view>

namespace torchium::optim::detail {
namespace {

struct FallbackReason {
  std::string_view kind;
  std::string_view before, after;  // the name
};

constexpr std::array kFallbackReasons{
    FallbackReason{"recurrent", "",
                   " has no Kronecker factors (its weights are not linear layers of modules)"},
    FallbackReason{"layer", "",
                   " has no Kronecker factors (it is not a linear layer, convolution, embedding or "
                   "norm)"},
    FallbackReason{"bare", "a parameter of ", ", used outside of a module that has factors"},
    FallbackReason{"not_seen", "a parameter of ",
                   ", not seen as weight or bias of a linear layer, convolution, embedding or "
                   "norm"},
    FallbackReason{"own_forward", "", " has a forward of its own, which may not be a linear layer"},
    FallbackReason{"jit", "", " is compiled by torch.jit and runs no hooks"},
    FallbackReason{"attention", "", " has kdim or vdim, and so weights outside of modules"},
    FallbackReason{"computed", "weight computed by ", ""},
    FallbackReason{"embedding", "Embedding ", ""},
    FallbackReason{"tied", "tied to an Embedding that ", ""},
    FallbackReason{"skipped", "in skip_layers", ""},
    FallbackReason{"not_run", "in no module that has run", ""},
    FallbackReason{"frozen", "its weight is not trained", ""},
    FallbackReason{"of_weight", "the bias of a weight that falls back", ""},
    FallbackReason{"lone_bias", kLoneBias, ""},
    FallbackReason{
        "other_bias",
        "not the one bias of its weight, or frozen when the factors of its weight were made", ""},
    FallbackReason{"groups", "used by convolutions of different groups", ""},
    FallbackReason{"both_ways", kUsedBothWays, ""},
    FallbackReason{"convolved", kConvolvedBothWays, ""},
    FallbackReason{"norm", kNormAndOther, ""},
    FallbackReason{"outside", kUsedOutside, ""},
    FallbackReason{"no_curvature", kNoCurvature, ""},
    FallbackReason{"not_captured", "no factors captured", ""},
};

}  // namespace

std::string fallback_reason(const std::string& kind, const std::string& name) {
  for (const FallbackReason& reason : kFallbackReasons) {
    if (reason.kind == kind) {
      return std::string(reason.before).append(name).append(reason.after);
    }
  }
  TORCH_CHECK_VALUE(false, "no reason for a fallback is called '", kind, "'");
}

}  // namespace torchium::optim::detail
