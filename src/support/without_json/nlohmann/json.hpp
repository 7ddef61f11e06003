// What functorch's headers need of the JSON library, which PyTorch does not install. Declared only:
// nothing here calls the functions that use it.
#pragma once

#include <string>

namespace nlohmann {

struct json {
  json();
  template <typename T>
  explicit json(const T& value);
  static json parse(const std::string& text);
  std::string dump() const;
  template <typename T>
  T get() const;
};

}  // namespace nlohmann
