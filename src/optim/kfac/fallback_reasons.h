// Why K-FAC has no factors for a parameter, in words for reports and warnings of both languages.
#pragma once

#include <string>

namespace torchium::optim::detail {

constexpr const char* kNoCurvature = "no update_curvature() covers its outputs";
constexpr const char* kUsedOutside = "used outside of its layer";
constexpr const char* kUsedBothWays = "used as [in, out] and as [out, in]";
constexpr const char* kConvolvedBothWays = "used by a convolution and by a transposed one";
constexpr const char* kNormAndOther = "used by a norm and by another layer";
constexpr const char* kSeveralBiases = "used by norms with different biases";
constexpr const char* kSharedRows = "looked up for positions that samples share";
constexpr const char* kLoneBias =
    "the bias of a transposed convolution, whose factors have no row for it";

// kind: one of the table in the source file. name: of a class, or of what the kind says. Throws
// c10::ValueError for another kind.
std::string fallback_reason(const std::string& kind, const std::string& name);

}  // namespace torchium::optim::detail
