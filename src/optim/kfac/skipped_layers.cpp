#include "optim/kfac/skipped_layers.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <regex>

namespace torchium::optim::detail {

void check_skip_layers(const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    try {
      const std::regex parsed(pattern);
    } catch (const std::regex_error& error) {
      TORCH_CHECK_VALUE(false, "skip_layers has '", pattern,
                        "', which is not a regular expression (", error.what(),
                        "); pass patterns for names or types of layers");
    }
  }
}

bool is_skipped_layer(const std::vector<std::string>& patterns, const std::string& name,
                      const std::string& type) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    const std::regex parsed(pattern);
    return std::regex_search(name, parsed) || std::regex_search(type, parsed);
  });
}

}  // namespace torchium::optim::detail
