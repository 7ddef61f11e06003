#ifdef TORCHIUM_WITH_CUDA
#include "optim/kfac/cuda/layer_products.h"

#include "linalg/products/batched_products.h"
#include "optim/core/cuda/kernel_tensors.h"
#include "support/tensor_version.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <optional>
#include <tuple>

namespace torchium::optim::detail {

constexpr int64_t kLayerAlignment = 32;  // elements; of each layer in a buffer

const float* diagonal_root(const at::Tensor& root) {
  return root.dim() == 2 ? root.const_data_ptr<float>() : nullptr;
}

int kfac_tiles(int64_t elements) {
  return static_cast<int>((elements + cuda_kernels::kKfacTile - 1) / cuda_kernels::kKfacTile);
}

LayerProducts::LayerProducts(const KfacGroup& group, const std::vector<size_t>& layers)
    : group_(group), options_(group.params[0].options().dtype(at::kFloat).requires_grad(false)) {
  find_shapes(layers);
  find_places(layers);
  add_split_layers(layers);
  add_entries(layers);
}

LayerProducts::Place LayerProducts::place(size_t k) const {
  const Shape& shape = shapes_[shape_of_[k]];
  return {starts_[k], shape.pitch, shape.leaves_in_second,
          split_of_[k] < 0 ? nullptr : split_.largest(split_of_[k])};
}

void LayerProducts::find_shapes(const std::vector<size_t>& layers) {
  std::map<std::tuple<int64_t, int64_t, bool, bool>, size_t> known;
  for (const size_t l : layers) {
    const KfacLayer& layer = group_.layers[l];
    Shape shape{.rows = layer.G.size(1),
                .columns = layer.A.size(1),
                .has_left = layer.G.dim() == 3,
                .has_right = layer.A.dim() == 3};
    shape.leaves_in_second = !is_exact() && shape.products() % 2 == 1;
    shape.is_split =
        !is_exact() && shape.products() == 2 && has_split_products(shape.rows, shape.columns);
    shape.pitch = shape.is_split ? split_pitch(shape.columns) : shape.columns;
    const auto [found, is_new] = known.try_emplace(
        {shape.rows, shape.columns, shape.has_left, shape.has_right}, shapes_.size());
    if (is_new) {
      shapes_.push_back(shape);
    }
    shape_of_.push_back(found->second);
  }
}

int64_t LayerProducts::add(int64_t elements) {
  const int64_t start = elements_;
  elements_ += (elements + kLayerAlignment - 1) / kLayerAlignment * kLayerAlignment;
  return start;
}

void LayerProducts::find_places(const std::vector<size_t>& layers) {
  for (size_t k = 0; k < layers.size(); ++k) {
    const KfacLayer& layer = group_.layers[layers[k]];
    const int64_t pitch = shapes_[shape_of_[k]].pitch;
    starts_.push_back(add(layer.A.size(0) * layer.G.size(1) * pitch));
    const at::Tensor& weight = group_.params[layer.weight];
    has_unused_column_ |= weight.numel() / weight.size(0) + (layer.bias < 0 ? 0 : 1) < pitch;
  }
}

void LayerProducts::add_split_layers(const std::vector<size_t>& layers) {
  for (size_t k = 0; k < layers.size(); ++k) {
    const KfacLayer& layer = group_.layers[layers[k]];
    const Shape& shape = shapes_[shape_of_[k]];
    split_of_.push_back(!shape.is_split
                            ? -1
                            : static_cast<int64_t>(split_.add({.left = floats(layer.G_root),
                                                               .right = floats(layer.A_root),
                                                               .start = starts_[k],
                                                               .groups = layer.A.size(0),
                                                               .rows = shape.rows,
                                                               .columns = shape.columns,
                                                               .pitch = shape.pitch})));
  }
  for (size_t k = 0; k < layers.size(); ++k) {
    if (split_of_[k] >= 0) {
      split_layers_.push_back(layers[k]);
    }
  }
  split_.finish(options_, /*may_keep=*/!group_.shared.capturable);
}

void LayerProducts::add_entries(const std::vector<size_t>& layers) {
  for (size_t s = 0; s < shapes_.size(); ++s) {
    Shape& shape = shapes_[s];
    shape.first = matrices_;
    for (size_t k = 0; k < layers.size(); ++k) {
      if (shape_of_[k] != s || shape.is_split) {
        continue;
      }
      const KfacLayer& layer = group_.layers[layers[k]];
      const int64_t groups = layer.A.size(0), elements = groups * shape.rows * shape.columns;
      address_tables_.add({.start = starts_[k],
                           .left = floats(layer.G_root),
                           .right = floats(layer.A_root),
                           .place = static_cast<int>(matrices_),
                           .count = static_cast<int>(groups),
                           .rows = static_cast<int>(shape.rows),
                           .columns = static_cast<int>(shape.columns),
                           .first_tile = 0},
                          1);
      if (is_exact()) {
        const size_t entry = eigenvalue_tables_.add({.start = starts_[k],
                                                     .left_values = floats(layer.G_eigenvalues),
                                                     .right_values = floats(layer.A_eigenvalues),
                                                     .left = diagonal_root(layer.G_root),
                                                     .right = diagonal_root(layer.A_root),
                                                     .damping = 0.0F,
                                                     .elements = static_cast<int>(elements),
                                                     .columns = static_cast<int>(shape.columns),
                                                     .group_rows = static_cast<int>(shape.rows),
                                                     .first_tile = 0,
                                                     .in_second = shape.products() % 2 == 1},
                                                    kfac_tiles(elements));
        eigenvalue_places_.emplace_back(layers[k], entry);
      }
      matrices_ += groups;
    }
    shape.count = matrices_ - shape.first;
  }
}

void LayerProducts::set_aside() {
  for (const auto& [layer, entry] : eigenvalue_places_) {
    eigenvalue_tables_[entry].damping = static_cast<float>(group_.layers[layer].damping);
  }
  first_ = has_unused_column_ ? at::zeros({elements_}, options_) : at::empty({elements_}, options_);
  second_ = at::empty({elements_}, options_);
  addresses_ = at::empty({4, matrices_}, options_.dtype(at::kLong));
  split_.clear();
}

void LayerProducts::free_all() { first_ = second_ = addresses_ = at::Tensor(); }

cuda_kernels::KfacBuffers LayerProducts::buffers() const {
  return {floats(first_), floats(second_)};
}

// Each only rises. None: inference tensors have no version.
std::optional<int64_t> LayerProducts::versions_of_roots() const {
  int64_t versions = 0;
  for (const size_t l : split_layers_) {
    for (const at::Tensor& root : {group_.layers[l].A_root, group_.layers[l].G_root}) {
      if (root.is_inference()) {
        return std::nullopt;
      }
      versions += torchium::detail::version_of(root);
    }
  }
  return versions;
}

void LayerProducts::precondition() {
  write_addresses();
  const bool single =
      linalg::detail::matmul_precision(std::nullopt) == linalg::detail::MatmulPrecision::kHigh;
  split_.run(buffers(), single, versions_of_roots());
  if (!is_exact()) {
    multiply(0, false, false);
    return;
  }
  multiply(0, /*transpose_left=*/true, /*transpose_right=*/false);
  divide();
  multiply(1, /*transpose_left=*/false, /*transpose_right=*/true);
}

bool LayerProducts::add_to(GraphKey& key) const {
  const auto precision = linalg::detail::matmul_precision(std::nullopt);
  add_bytes(key, precision);
  return split_.add_to(key, precision == linalg::detail::MatmulPrecision::kHigh,
                       versions_of_roots());
}

void LayerProducts::write_addresses() const {
  for (const auto& table : address_tables_) {
    C10_CUDA_CHECK(cuda_kernels::write_addresses(
        table, buffers(), {addresses(0), addresses(1), addresses(2), addresses(3)},
        c10::cuda::getCurrentCUDAStream()));
  }
}

float** LayerProducts::addresses(int64_t array) const {
  return reinterpret_cast<float**>(addresses_.mutable_data_ptr<int64_t>() + array * matrices_);
}

void LayerProducts::multiply(int pass, bool transpose_left, bool transpose_right) const {
  const auto precision = linalg::detail::matmul_precision(std::nullopt);
  for (const Shape& shape : shapes_) {
    if (shape.is_split) {
      continue;
    }
    int done = pass * shape.products();
    const auto array = [&](int64_t number) { return addresses(number) + shape.first; };
    if (shape.has_left) {
      linalg::detail::multiply_at_addresses(array((done + 1) % 2), {array(2), transpose_left},
                                            {array(done % 2)}, shape.rows, shape.columns,
                                            shape.rows, shape.count, precision);
      ++done;
    }
    if (shape.has_right) {
      linalg::detail::multiply_at_addresses(array((done + 1) % 2), {array(done % 2)},
                                            {array(3), transpose_right}, shape.rows, shape.columns,
                                            shape.columns, shape.count, precision);
    }
  }
}

// By lambda_G lambda_A^T + damping.
void LayerProducts::divide() const {
  for (const auto& table : eigenvalue_tables_) {
    C10_CUDA_CHECK(
        cuda_kernels::divide_by_eigenvalues(table, buffers(), c10::cuda::getCurrentCUDAStream()));
  }
}

}  // namespace torchium::optim::detail
#endif
