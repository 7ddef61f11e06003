#include "optim/kfac/skipped_layers.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

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

std::string unmatched_skips_warning(const std::string& optimizer,
                                    const std::vector<std::string>& entries,
                                    const std::vector<std::string>& layers) {
  constexpr size_t kShown = 4;
  std::string shown;
  for (size_t i = 0; i < std::min(layers.size(), kShown); ++i) {
    shown += (i > 0 ? ", " : "") + layers[i];
  }
  if (layers.size() > kShown) {
    shown += c10::str(", ", layers.size() - kShown, " more");
  }
  return c10::str(optimizer, " skips no layer for ", c10::Join(", ", entries),
                  " of skip_layers, which no name and no class of a layer matches; the layers are ",
                  shown);
}

}  // namespace torchium::optim::detail
