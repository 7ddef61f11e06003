// Messages about many parameters, of bounded length.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace torchium::optim::detail {

using NamesByKind = std::map<std::string, std::vector<std::string>>;

// How many there are of each kind, the largest kinds first, and a few names of each: as
// "2 (looked up as an embedding: words.weight, positions.weight)", in less than 900 characters.
std::string summary(const NamesByKind& names);

}  // namespace torchium::optim::detail
