// Layers that the user leaves to the first-order step (skip_layers of kfac-pytorch).
#pragma once

#include <string>
#include <vector>

namespace torchium::optim::detail {

// Throws c10::ValueError for a pattern that is not a regular expression.
void check_skip_layers(const std::vector<std::string>& patterns);

// Whether one of the patterns, regular expressions, is found in the layer's name or in its type.
bool is_skipped_layer(const std::vector<std::string>& patterns, const std::string& name,
                      const std::string& type);

// About entries of skip_layers that match none of the layers, such as "'head' (Linear)"; both as
// they are to be shown.
std::string unmatched_skips_warning(const std::string& optimizer,
                                    const std::vector<std::string>& entries,
                                    const std::vector<std::string>& layers);

}  // namespace torchium::optim::detail
