// Options of both K-FAC and natural gradient.
#pragma once

#include "optim/core/options.h"

namespace torchium::optim {

constexpr auto kFishers = detail::one_of("empirical", "mc", "ggn");

namespace detail {

// Throws c10::ValueError where momentum hides the reduction of a single step.
inline void check_adaptive_damping(bool adaptive_damping, double momentum) {
  TORCH_CHECK_VALUE(!adaptive_damping || momentum == 0.0,
                    "adaptive_damping=True compares steps without momentum; use momentum=0, got ",
                    text_of(momentum));
}

// Throws c10::ValueError where the host would read what captured steps predict.
inline void check_capturable(bool capturable, bool adaptive_damping) {
  TORCH_CHECK_VALUE(!capturable || !adaptive_damping,
                    "adaptive_damping=True counts steps on the host, which does not see replays; "
                    "with capturable=True use adaptive_damping=False");
}

}  // namespace detail
}  // namespace torchium::optim
