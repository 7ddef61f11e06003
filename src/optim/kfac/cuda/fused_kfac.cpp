#include "optim/kfac/cuda/fused_kfac.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/kfac_step.h"
#include "linalg/products/batched_products.h"
#include "optim/core/cuda/device_check.h"
#include "optim/core/cuda/kernel_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#endif

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::AddressEntry;
using cuda_kernels::EigenvalueEntry;
using cuda_kernels::KfacEntry;

constexpr int64_t kLayerAlignment = 32;  // elements; of each layer in a buffer

int tiles_of(int64_t elements) {
  return static_cast<int>((elements + cuda_kernels::kKfacTile - 1) / cuda_kernels::kKfacTile);
}

// Where the elements of a parameter lie, which is a matrix of its first dimension and the others.
struct MatrixLayout {
  int64_t row_stride, inner, inner_stride, outer_stride;  // KfacEntry
};

// None for a layout that the kernels do not know.
std::optional<MatrixLayout> matrix_layout(const at::Tensor& param) {
  if (param.is_contiguous()) {
    return MatrixLayout{param.numel() / param.size(0), 1, 0, 1};
  }
  if (param.dim() == 2) {
    return MatrixLayout{param.stride(0), 1, 0, param.stride(1)};
  }
  if (param.dim() == 4 && param.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return MatrixLayout{param.stride(0), param.size(2) * param.size(3), param.size(1), 1};
  }
  return std::nullopt;
}

bool is_known(const at::Tensor& param, const at::Tensor* momentum_buffer, bool of_a_layer) {
  return param.is_cuda() && state_dtype(param) == at::kFloat &&
         param.is_non_overlapping_and_dense() && param.numel() < std::numeric_limits<int>::max() &&
         (!of_a_layer || matrix_layout(param).has_value()) &&
         (momentum_buffer == nullptr || same_layout(*momentum_buffer, param));
}

bool is_known(const KfacLayer& layer, DampingSplit split) {
  const auto fits = [](const at::Tensor& state) {
    return state.is_contiguous() && aligned_to_four(state);
  };
  return layer.A.size(0) * layer.G.size(1) * layer.A.size(1) < std::numeric_limits<int>::max() &&
         fits(layer.A_root) && fits(layer.G_root) &&
         (split != DampingSplit::kExact ||
          (fits(layer.A_eigenvalues) && fits(layer.G_eigenvalues)));
}

// Layers of one shape, whose products share launches. V: [rows, columns] in each group.
struct ShapeGroup {
  int64_t rows, columns;
  bool has_left, has_right;  // whether the roots of G and A are matrices
  std::vector<size_t> layers = {};
  int64_t first = 0, count = 0;  // matrices in the arrays of addresses

  int products() const { return has_left + has_right; }  // of one pass
};

class KfacKernels : public FusedKfac {
 public:
  KfacKernels(const KfacHyperparameters& h, at::TensorList params, at::TensorList grads,
              const std::vector<KfacLayer>& layers, KfacState& state)
      : h_(h),
        params_(params),
        layers_(layers),
        state_(state),
        options_(params[0].options().dtype(at::kFloat).requires_grad(false)),
        stream_(c10::cuda::getCurrentCUDAStream()),
        check_(options_, state.status),
        grads_(grads) {
    for (size_t i = 0; i < params.size(); ++i) {
      const bool shared = i > 0 && h.parameters[i].lr.is_same(h.parameters[i - 1].lr);
      lrs_.push_back(shared ? lrs_.back() : readable_learning_rate(h.parameters[i].lr));
    }
  }

  FoundInfGuard begin(const std::vector<Examined>& sums) override {
    const c10::DeviceGuard device_guard(options_.device());
    for (size_t i = 0; i < params_.size(); ++i) {
      check_.add_parameter(params_[i], h_.parameters[i].weight_decay, state_.steps[i]);
      check_.set_updated(i);
    }
    for (const Examined& sum : sums) {
      check_.add_scan(sum.tensor, sum.param, cuda_kernels::ScanKind::kGradient, sum.largest,
                      nullptr);
    }
    check_.begin(grads_);
    check_.run({}, h_.found_inf);
    return check_.guard();
  }

  void update() override {
    const c10::DeviceGuard device_guard(options_.device());
    find_shapes();
    set_aside_buffers();
    const KernelTables<KfacEntry> entries = make_entries();
    for (const auto& table : entries) {
      C10_CUDA_CHECK(cuda_kernels::gather_kfac(table, check_.control(), stream_));
    }
    precondition();
    const at::Tensor nu = clip(entries);
    for (const auto& table : entries) {
      C10_CUDA_CHECK(cuda_kernels::update_by_kfac(
          table, check_.control(), nu.defined() ? nu.const_data_ptr<float>() : nullptr, stream_));
    }
    for (size_t i = 0; i < params_.size(); ++i) {
      note_change(params_[i]);
      if (h_.parameters[i].momentum > 0.0) {
        note_change(state_.momentum_buffers[i]);
      }
    }
  }

 private:
  bool is_exact() const { return h_.damping_split == DampingSplit::kExact; }

  void find_shapes() {
    std::map<std::tuple<int64_t, int64_t, bool, bool>, size_t> known;
    for (size_t l = 0; l < layers_.size(); ++l) {
      const KfacLayer& layer = layers_[l];
      const int64_t rows = layer.G.size(1), columns = layer.A.size(1);
      const bool has_left = layer.G.dim() == 3, has_right = layer.A.dim() == 3;
      const auto [found, is_new] =
          known.try_emplace({rows, columns, has_left, has_right}, shapes_.size());
      if (is_new) {
        shapes_.push_back({rows, columns, has_left, has_right});
      }
      shapes_[found->second].layers.push_back(l);
      shape_of_.push_back(found->second);
    }
  }

  // Two buffers, each with V of all layers: every product goes from one to the other.
  void set_aside_buffers() {
    int64_t elements = 0;
    bool has_unused_column = false;
    for (const KfacLayer& layer : layers_) {
      starts_.push_back(elements);
      const int64_t groups = layer.A.size(0), rows = layer.G.size(1), columns = layer.A.size(1);
      elements +=
          (groups * rows * columns + kLayerAlignment - 1) / kLayerAlignment * kLayerAlignment;
      const at::Tensor& weight = params_[layer.weight];
      has_unused_column |= layer.bias < 0 && weight.numel() / weight.size(0) < columns;
    }
    // The gradient of a bias that is not in the step counts as zero.
    buffers_[0] =
        has_unused_column ? at::zeros({elements}, options_) : at::empty({elements}, options_);
    buffers_[1] = at::empty({elements}, options_);
  }

  // V of a layer after this many products.
  float* matrix_after(size_t l, int products) const {
    return buffers_[products % 2].mutable_data_ptr<float>() + starts_[l];
  }

  KernelTables<KfacEntry> make_entries() const {
    std::vector<KfacEntry> entries(params_.size());
    for (size_t i = 0; i < params_.size(); ++i) {
      fill_parameter(entries[i], i);
    }
    for (size_t l = 0; l < layers_.size(); ++l) {
      const KfacLayer& layer = layers_[l];
      fill_layer(entries[layer.weight], l, params_[layer.weight], 0);
      if (layer.bias >= 0) {
        fill_layer(entries[layer.bias], l, params_[layer.bias], entries[layer.weight].columns);
      }
    }
    KernelTables<KfacEntry> tables;
    for (const KfacEntry& entry : entries) {
      const int64_t elements = int64_t{entry.rows} * entry.columns;
      if (elements > 0) {
        tables.add(entry, tiles_of(elements));
      }
    }
    return tables;
  }

  // As a parameter of no layer: its elements in the order of the memory.
  void fill_parameter(KfacEntry& entry, size_t i) const {
    const KfacParameterOptions& options = h_.parameters[i];
    entry.param = params_[i].mutable_data_ptr();
    entry.grad = check_.gradient(i);
    entry.momentum_buffer =
        options.momentum > 0.0 ? state_.momentum_buffers[i].mutable_data_ptr<float>() : nullptr;
    entry.lr = learning_rate(lrs_[i]);
    entry.momentum = static_cast<float>(options.momentum);
    entry.weight_decay = static_cast<float>(options.weight_decay);
    entry.rows = 1;
    entry.columns = entry.packed_columns = static_cast<int>(params_[i].numel());
    entry.inner = entry.outer_stride = entry.group_rows = 1;
    entry.param_type = element_type(params_[i].scalar_type());
    entry.grad_type = check_.gradient_kind(i).type;
    entry.maximize = options.maximize;
  }

  void fill_layer(KfacEntry& entry, size_t l, const at::Tensor& param, int first_column) const {
    const KfacLayer& layer = layers_[l];
    const MatrixLayout layout = *matrix_layout(param);
    const int products = shapes_[shape_of_[l]].products();
    entry.gathered = matrix_after(l, 0);
    entry.direction = matrix_after(l, is_exact() ? 2 * products : products);
    entry.left = diagonal(layer.G_root);
    entry.right = diagonal(layer.A_root);
    entry.rows = static_cast<int>(param.size(0));
    entry.columns = static_cast<int>(param.numel() / param.size(0));
    entry.row_stride = static_cast<int>(layout.row_stride);
    entry.inner = static_cast<int>(layout.inner);
    entry.inner_stride = static_cast<int>(layout.inner_stride);
    entry.outer_stride = static_cast<int>(layout.outer_stride);
    entry.packed_columns = static_cast<int>(layer.A.size(1));
    entry.first_column = first_column;
    entry.group_rows = static_cast<int>(layer.G.size(1));
  }

  static const float* diagonal(const at::Tensor& root) {
    return root.dim() == 2 ? root.const_data_ptr<float>() : nullptr;
  }

  // V -> (G + ..I)^-1 V (A + ..I)^-1, or the same with eigenvectors.
  void precondition() {
    write_addresses();
    if (!is_exact()) {
      multiply(0, false, false);
      return;
    }
    multiply(0, /*transpose_left=*/true, /*transpose_right=*/false);
    divide();
    multiply(1, /*transpose_left=*/false, /*transpose_right=*/true);
  }

  void write_addresses() {
    KernelTables<AddressEntry> table;
    int64_t count = 0;
    for (ShapeGroup& shape : shapes_) {
      shape.first = count;
      for (const size_t l : shape.layers) {
        const int64_t groups = layers_[l].A.size(0);
        table.add({.front = matrix_after(l, 0),
                   .back = matrix_after(l, 1),
                   .left = layers_[l].G_root.mutable_data_ptr<float>(),
                   .right = layers_[l].A_root.mutable_data_ptr<float>(),
                   .place = static_cast<int>(count),
                   .count = static_cast<int>(groups),
                   .rows = static_cast<int>(shape.rows),
                   .columns = static_cast<int>(shape.columns),
                   .first_tile = 0},
                  1);
        count += groups;
      }
      shape.count = count - shape.first;
    }
    addresses_ = at::empty({4, count}, options_.dtype(at::kLong));
    for (const auto& part : table) {
      C10_CUDA_CHECK(cuda_kernels::write_addresses(
          part, {addresses(0), addresses(1), addresses(2), addresses(3)}, stream_));
    }
  }

  // 0 and 1: V in the two buffers; 2: the roots of G; 3: those of A.
  float** addresses(int64_t array) const {
    return reinterpret_cast<float**>(addresses_.mutable_data_ptr<int64_t>() +
                                     array * addresses_.size(1));
  }

  void multiply(int pass, bool transpose_left, bool transpose_right) const {
    const auto precision = linalg::detail::matmul_precision(std::nullopt);
    for (const ShapeGroup& shape : shapes_) {
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
                                              {array(3), transpose_right}, shape.rows,
                                              shape.columns, shape.columns, shape.count, precision);
      }
    }
  }

  // By lambda_G lambda_A^T + damping.
  void divide() const {
    KernelTables<EigenvalueEntry> tables;
    for (size_t l = 0; l < layers_.size(); ++l) {
      const KfacLayer& layer = layers_[l];
      const int64_t elements = layer.A.size(0) * layer.G.size(1) * layer.A.size(1);
      tables.add({.rotated = matrix_after(l, shapes_[shape_of_[l]].products()),
                  .left_values = layer.G_eigenvalues.const_data_ptr<float>(),
                  .right_values = layer.A_eigenvalues.const_data_ptr<float>(),
                  .left = diagonal(layer.G_root),
                  .right = diagonal(layer.A_root),
                  .damping = static_cast<float>(layer.damping),
                  .elements = static_cast<int>(elements),
                  .columns = static_cast<int>(layer.A.size(1)),
                  .group_rows = static_cast<int>(layer.G.size(1)),
                  .first_tile = 0},
                 tiles_of(elements));
    }
    for (const auto& table : tables) {
      C10_CUDA_CHECK(cuda_kernels::divide_by_eigenvalues(table, stream_));
    }
  }

  // nu = min(1, sqrt(kl_clip / |sum v.g lr^2|)) over the parameters of the layers; undefined: 1.
  at::Tensor clip(const KernelTables<KfacEntry>& entries) const {
    if (!h_.kl_clip.has_value() || layers_.empty()) {
      return {};
    }
    const at::Tensor products = at::empty({entries.tiles()}, options_.dtype(at::kDouble));
    at::Tensor nu = at::empty({}, options_);
    for (const auto& table : entries) {
      C10_CUDA_CHECK(
          cuda_kernels::sum_products(table, products.mutable_data_ptr<double>(), stream_));
    }
    C10_CUDA_CHECK(cuda_kernels::clip_by_products(products.const_data_ptr<double>(),
                                                  entries.tiles(), *h_.kl_clip,
                                                  nu.mutable_data_ptr<float>(), stream_));
    return nu;
  }

  const KfacHyperparameters& h_;
  at::TensorList params_;
  const std::vector<KfacLayer>& layers_;
  KfacState& state_;
  at::TensorOptions options_;  // of float32 buffers
  cudaStream_t stream_;
  DeviceCheck check_;
  at::TensorList grads_;
  std::vector<at::Tensor> lrs_;  // as the kernels read them
  std::vector<ShapeGroup> shapes_;
  std::vector<size_t> shape_of_;  // of each layer
  std::vector<int64_t> starts_;   // of each layer in the buffers
  at::Tensor buffers_[2];
  at::Tensor addresses_;  // [4, matrices]
};

}  // namespace

std::unique_ptr<FusedKfac> FusedKfac::make(const KfacHyperparameters& h, at::TensorList params,
                                           at::TensorList grads,
                                           const std::vector<KfacLayer>& layers, KfacState& state) {
  if (!params[0].is_cuda()) {
    return nullptr;
  }
  std::vector<bool> of_a_layer(params.size(), false);
  for (const KfacLayer& layer : layers) {
    of_a_layer[layer.weight] = true;
    if (layer.bias >= 0) {
      of_a_layer[layer.bias] = true;
    }
    if (!is_known(layer, h.damping_split)) {
      return nullptr;
    }
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor* buffer =
        h.parameters[i].momentum > 0.0 ? &state.momentum_buffers[i] : nullptr;
    if (!is_known(params[i], buffer, of_a_layer[i])) {
      return nullptr;
    }
  }
  const c10::DeviceGuard device_guard(params[0].device());
  return std::make_unique<KfacKernels>(h, params, grads, layers, state);
}

#else

std::unique_ptr<FusedKfac> FusedKfac::make(const KfacHyperparameters&, at::TensorList,
                                           at::TensorList, const std::vector<KfacLayer>&,
                                           KfacState&) {
  return nullptr;
}
#endif

}  // namespace torchium::optim::detail
