// Tables of kernels (cuda_kernels/common/parameter_table.h) for lists of any length. CUDA
// builds only.
#pragma once

#include "cuda_kernels/common/parameter_table.h"

#include <vector>

namespace torchium::optim::detail {

// Spreads entries, each with a number of tiles, over as many tables as they need.
template <typename Entry>
class KernelTables {
 public:
  // Tiles are counted from `first_tile` on.
  explicit KernelTables(int first_tile) : tiles_(first_tile) {}
  KernelTables() = default;

  static constexpr size_t kCapacity = cuda_kernels::Table<Entry>::kCapacity;

  // Returns the number of the entry.
  size_t add(Entry entry, int tiles) {
    if (tables_.empty() || tables_.back().count == kCapacity) {
      tables_.emplace_back();
      tables_.back().first_tile = tiles_;
    }
    cuda_kernels::Table<Entry>& table = tables_.back();
    if constexpr (requires { entry.first_tile; }) {
      entry.first_tile = tiles_;
    }
    table.entries[table.count++] = entry;
    tiles_ += tiles;
    table.end_tile = tiles_;
    return (tables_.size() - 1) * kCapacity + static_cast<size_t>(table.count) - 1;
  }
  Entry& operator[](size_t number) {
    return tables_[number / kCapacity].entries[number % kCapacity];
  }
  const Entry& operator[](size_t number) const {
    return tables_[number / kCapacity].entries[number % kCapacity];
  }
  // The end of the last tile.
  int tiles() const { return tiles_; }
  auto begin() const { return tables_.begin(); }
  auto end() const { return tables_.end(); }

 private:
  std::vector<cuda_kernels::Table<Entry>> tables_;
  int tiles_ = 0;
};

}  // namespace torchium::optim::detail
