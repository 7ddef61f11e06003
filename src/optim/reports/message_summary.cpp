#include "optim/reports/message_summary.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace torchium::optim::detail {
namespace {

constexpr size_t kKinds = 5;
constexpr size_t kNames = 2;  // of one kind
constexpr size_t kKindLength = 100;
constexpr size_t kNameLength = 40;

// The text with its middle left out: names differ at their ends.
std::string shortened(const std::string& text, size_t length) {
  const size_t begin = length / 4;
  return text.size() <= length
             ? text
             : text.substr(0, begin) + "..." + text.substr(text.size() - (length - 3 - begin));
}

std::string one_kind(const std::string& kind, const std::vector<std::string>& names) {
  std::string text = c10::str(names.size(), " (", shortened(kind, kKindLength), ": ");
  for (size_t i = 0; i < std::min(names.size(), kNames); ++i) {
    text += (i > 0 ? ", " : "") + shortened(names[i], kNameLength);
  }
  return text + (names.size() > kNames ? c10::str(", ", names.size() - kNames, " more)") : ")");
}

}  // namespace

std::string summary(const NamesByKind& names) {
  std::vector<NamesByKind::const_iterator> kinds;
  for (auto kind = names.begin(); kind != names.end(); ++kind) {
    kinds.push_back(kind);
  }
  std::stable_sort(kinds.begin(), kinds.end(), [](const auto& a, const auto& b) {
    return a->second.size() > b->second.size();
  });
  std::string text;
  size_t others = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (i < kKinds) {
      text += (i > 0 ? ", " : "") + one_kind(kinds[i]->first, kinds[i]->second);
    } else {
      others += kinds[i]->second.size();
    }
  }
  return others > 0 ? c10::str(text, ", ", others, " of other kinds") : text;
}

}  // namespace torchium::optim::detail
