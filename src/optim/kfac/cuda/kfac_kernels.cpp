#include "optim/kfac/cuda/kfac_kernels.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/kfac_step.h"
#include "optim/core/cuda/device_check.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"
#include "optim/kfac/cuda/factor_updates.h"
#include "optim/kfac/cuda/layer_products.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>
#include <optional>
#endif

#include <ATen/ATen.h>

#include <utility>

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::KfacEntry;

// Where the elements of a parameter lie, which is a matrix of its first dimension and the others.
struct MatrixLayout {
  int64_t row_stride, inner, inner_stride, outer_stride;  // KfacEntry
};

// None for a layout that the kernels do not know.
std::optional<MatrixLayout> matrix_layout(const at::Tensor& param) {
  if (param.numel() == 0) {
    return std::nullopt;
  }
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

// Those of these layers that this rank preconditions.
std::vector<size_t> preconditioned(const KfacGroup& group, std::vector<size_t> layers) {
  std::erase_if(layers, [&](size_t l) { return !group.layers[l].preconditions; });
  return layers;
}

class KfacKernels : public KfacSubset {
 public:
  KfacKernels(const KfacGroup& group, KfacMembers members, DeviceCheck& check)
      : group_(group),
        members_(std::move(members)),
        check_(check),
        factors_(group, members_),
        products_(group, preconditioned(group, members_.layers)),
        layer_places_(group.layers.size()) {
    std::vector<KfacEntry> entries(group.params.size());
    for (const size_t i : members_.params) {
      check.set_updated(i);
      entries[i] = entry_of(i);
    }
    size_t of_products = 0;
    for (const size_t l : members_.layers) {
      const KfacLayer& layer = group.layers[l];
      layer_places_[l] =
          layer.preconditions ? products_.place(of_products++) : place_of_received(layer);
      int column = 0;
      for (const int64_t i : layer.params()) {
        fill_layer(entries[i], layer, layer_places_[l], group.params[i], column);
        column = entries[i].columns;
      }
    }
    for (const size_t l : members_.norms) {
      add_norm(group.unitwise[l], entries);
    }
    for (const size_t i : members_.params) {
      const int64_t elements = int64_t{entries[i].rows} * entries[i].columns;
      if (elements > 0) {
        places_.push_back({i, tables_.add(entries[i], kfac_tiles(elements)), false});
      }
    }
  }

  void update_factors(const KfacRun&) override { factors_.run(check_.control()); }

  void precondition(const KfacRun&) override {
    set_entries();
    if (!has_layers()) {
      return;
    }
    products_.set_aside();
    for (const auto& table : tables_) {
      C10_CUDA_CHECK(cuda_kernels::gather_kfac(table, check_.control(), check_.numbers(),
                                               products_.buffers(), stream()));
    }
    products_.precondition();
    for (const auto& table : norm_tables_) {
      C10_CUDA_CHECK(cuda_kernels::solve_unitwise(table, products_.buffers(), stream()));
    }
  }

  std::vector<at::Tensor> directions(size_t l) const override {
    const auto& [start, pitch, in_second, largest] = layer_places_[l];
    std::vector<at::Tensor> all;
    int64_t first = start;
    for (const int64_t i : group_.layers[l].params()) {
      const at::Tensor& param = group_.params[i];
      const int64_t rows = param.size(0), columns = param.numel() / rows;
      const at::Tensor matrix =
          products_.buffer(in_second).as_strided({rows, columns}, {pitch, 1}, first);
      all.push_back(param.dim() == 1 ? matrix.select(1, 0) : matrix);
      first += columns;
    }
    return all;
  }

  at::Tensor kl_terms(const KfacRun&) override {
    if (!has_layers()) {
      return {};
    }
    at::Tensor terms = at::empty(
        {tables_.tiles()}, group_.params[0].options().dtype(at::kDouble).requires_grad(false));
    for (const auto& table : tables_) {
      C10_CUDA_CHECK(cuda_kernels::sum_products(table, check_.numbers(), products_.buffers(),
                                                terms.mutable_data_ptr<double>(), stream()));
    }
    return terms;
  }

  void apply(const KfacRun& run, const StepScalar& nu) override {
    if (group_.shared.writes_gradients) {
      write_gradients(run, nu);
      return;
    }
    update(nu);
    for (const TablePlace& place : places_) {
      note_change(group_.params[place.param]);
      note_change(group_.states[place.param].momentum_buffer);
    }
  }

  bool add_to(GraphKey& key) const override { return products_.add_to(key); }

  void end() override {
    products_.free_all();
    lrs_.clear();
  }
  at::Tensor kept() const override { return products_.kept(); }

 private:
  void update(const StepScalar& nu) const {
    const double* scale = nu.device.defined() ? nu.device.const_data_ptr<double>() : nullptr;
    for (const auto& table : tables_) {
      C10_CUDA_CHECK(cuda_kernels::update_by_kfac(table, check_.control(), check_.numbers(),
                                                  products_.buffers(), scale, stream()));
    }
  }

  // .grad <- 0, then a step of it with lr = -1: .grad <- 0 + nu d. A gradient in another layout
  // than its parameter gets d from a tensor in that layout.
  void write_gradients(const KfacRun& run, const StepScalar& nu) {
    if (places_.empty()) {
      return;
    }
    std::vector<at::Tensor> grads, targets;
    for (const TablePlace& place : places_) {
      const at::Tensor& grad = run.grads[place.param];
      const at::Tensor& param = group_.params[place.param];
      const bool fits = is_readable(grad, param, /*is_updated=*/true);
      grads.push_back(grad);
      targets.push_back(fits ? grad : at::zeros_like(param, at::TensorOptions(at::kFloat)));
      KfacEntry& entry = tables_[place.entry];
      entry.param = targets.back().mutable_data_ptr();
      entry.param_type = element_type(targets.back().scalar_type());
      entry.lr = {.device = nullptr, .is_double = true, .host = -1.0};
    }
    // A skipped step leaves them. Those of a step that is kept are finite.
    const at::Tensor skips = run.prologue.guard().keep().logical_not();
    at::_foreach_mul_(grads, skips.to(grads[0].scalar_type()));
    update(nu);
    for (size_t k = 0; k < grads.size(); ++k) {
      if (targets[k].is_same(grads[k])) {
        note_change(grads[k]);
      } else {
        grads[k].add_(targets[k]);
      }
    }
  }

  bool has_layers() const { return !members_.layers.empty() || !members_.norms.empty(); }

  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }

  // As a parameter of no layer: its elements in the order of the memory.
  KfacEntry entry_of(size_t i) const {
    const at::Tensor& param = group_.params[i];
    const KfacParameterOptions& options = group_.options[i];
    KfacEntry entry{};
    entry.param = param.mutable_data_ptr();
    entry.momentum_buffer = floats(group_.states[i].momentum_buffer);
    entry.momentum = static_cast<float>(options.momentum);
    entry.weight_decay = static_cast<float>(options.weight_decay);
    entry.start = -1;
    entry.rows = 1;
    entry.columns = entry.packed_columns = static_cast<int>(param.numel());
    entry.inner = entry.outer_stride = entry.group_rows = 1;
    entry.index = static_cast<int>(i);
    entry.param_type = element_type(param.scalar_type());
    entry.maximize = options.maximize;
    return entry;
  }

  // The direction of another rank replaces V.
  LayerProducts::Place place_of_received(const KfacLayer& layer) {
    const at::Tensor& weight = group_.params[layer.weight];
    const int64_t columns = weight.numel() / weight.size(0) + (layer.bias < 0 ? 0 : 1);
    return {products_.add(weight.size(0) * columns), columns, /*in_second=*/false, nullptr};
  }

  static void fill_layer(KfacEntry& entry, const KfacLayer& layer,
                         const LayerProducts::Place& place, const at::Tensor& param,
                         int first_column) {
    const MatrixLayout layout = *matrix_layout(param);
    entry.start = place.start;
    entry.in_second = place.in_second;
    entry.left = layer.preconditions ? diagonal_root(layer.G_root) : nullptr;
    entry.right = layer.preconditions ? diagonal_root(layer.A_root) : nullptr;
    entry.rows = static_cast<int>(param.size(0));
    entry.columns = static_cast<int>(param.numel() / param.size(0));
    entry.row_stride = static_cast<int>(layout.row_stride);
    entry.inner = static_cast<int>(layout.inner);
    entry.inner_stride = static_cast<int>(layout.inner_stride);
    entry.outer_stride = static_cast<int>(layout.outer_stride);
    entry.packed_columns = static_cast<int>(place.pitch);
    entry.largest = place.largest;
    entry.first_column = first_column;
    entry.group_rows = static_cast<int>(layer.G.size(1));
  }

  // V of its parameters becomes their direction in its place.
  void add_norm(const UnitwiseLayer& norm, std::vector<KfacEntry>& entries) {
    for (const int64_t i : norm.params()) {
      entries[i].start = products_.add(group_.params[i].numel());
    }
    const auto channels = static_cast<int>(norm.blocks.size(0));
    norm_tables_.add({.blocks = floats(norm.blocks),
                      .scale = entries[norm.weight].start,
                      .shift = norm.bias < 0 ? -1 : entries[norm.bias].start,
                      .damping = 0.0,
                      .channels = channels,
                      .order = static_cast<int>(norm.blocks.size(-1)),
                      .first_tile = 0},
                     (channels + cuda_kernels::kUnitwiseTile - 1) / cuda_kernels::kUnitwiseTile);
  }

  // What changes from step to step.
  void set_entries() {
    for (size_t k = 0; k < members_.norms.size(); ++k) {
      const UnitwiseLayer& norm = group_.unitwise[members_.norms[k]];
      norm_tables_[k].damping = std::max(norm.damping, norm.floor);
    }
    const at::Tensor* before = nullptr;
    for (const TablePlace& place : places_) {
      const at::Tensor& lr = group_.options[place.param].lr;
      if (before == nullptr || !lr.is_same(*before)) {
        lrs_.push_back(readable_learning_rate(lr));
      }
      before = &lr;
      KfacEntry& entry = tables_[place.entry];
      entry.lr = learning_rate(lrs_.back());
      entry.grad_type = check_.gradient_kind(place.param).type;
    }
  }

  const KfacGroup& group_;
  KfacMembers members_;
  DeviceCheck& check_;
  FactorUpdates factors_;
  LayerProducts products_;
  std::vector<LayerProducts::Place> layer_places_;  // of each layer of the group
  KernelTables<KfacEntry> tables_;
  KernelTables<cuda_kernels::UnitwiseEntry> norm_tables_;
  std::vector<TablePlace> places_;  // of parameters that have elements
  std::vector<at::Tensor> lrs_;     // of one step, as the kernels read them
};

bool is_known(const at::Tensor& param, const at::Tensor& momentum_buffer) {
  return param.is_cuda() && state_dtype(param) == at::kFloat &&
         param.is_non_overlapping_and_dense() && param.numel() < std::numeric_limits<int>::max() &&
         (!momentum_buffer.defined() || same_layout(momentum_buffer, param));
}

}  // namespace

bool has_kfac_kernels(const KfacGroup& group, size_t i) {
  return is_known(group.params[i], group.states[i].momentum_buffer);
}

bool has_kfac_kernels(const KfacGroup& group, const KfacLayer& layer) {
  const auto params = layer.params();
  const auto fits = [](const at::Tensor& state) {
    return state.is_contiguous() && aligned_to_four(state);
  };
  return std::ranges::all_of(params,
                             [&](int64_t i) {
                               return has_kfac_kernels(group, static_cast<size_t>(i)) &&
                                      matrix_layout(group.params[i]).has_value();
                             }) &&
         layer.A.size(0) * layer.G.size(1) * layer.A.size(1) < std::numeric_limits<int>::max() &&
         layer.A.is_contiguous() && layer.G.is_contiguous() &&
         (!layer.preconditions || (fits(layer.A_root) && fits(layer.G_root) &&
                                   (group.shared.damping_split != DampingSplit::kExact ||
                                    (fits(layer.A_eigenvalues) && fits(layer.G_eigenvalues)))));
}

bool has_kfac_kernels(const KfacGroup& group, const UnitwiseLayer& layer) {
  const auto fits = [&](int64_t i) {
    return has_kfac_kernels(group, static_cast<size_t>(i)) && group.params[i].is_contiguous() &&
           group.params[i].numel() == layer.blocks.size(0);
  };
  return std::ranges::all_of(layer.params(), fits) && layer.blocks.is_contiguous() &&
         layer.blocks.numel() > 0 && layer.blocks.scalar_type() == at::kFloat;
}

std::unique_ptr<KfacSubset> make_kfac_kernels(const KfacGroup& group, KfacMembers members,
                                              StepPrologue& prologue) {
  return std::make_unique<KfacKernels>(group, std::move(members),
                                       static_cast<DeviceCheck&>(prologue));
}

#else

bool has_kfac_kernels(const KfacGroup&, const KfacLayer&) { return false; }
bool has_kfac_kernels(const KfacGroup&, const UnitwiseLayer&) { return false; }
bool has_kfac_kernels(const KfacGroup&, size_t) { return false; }

std::unique_ptr<KfacSubset> make_kfac_kernels(const KfacGroup&, KfacMembers, StepPrologue&) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
#endif

at::Tensor kl_scale_on_device(double kl_clip, const at::Tensor& terms) {
#ifdef TORCHIUM_WITH_CUDA
  if (terms.is_cuda()) {
    at::Tensor scale = at::empty({}, terms.options());
    C10_CUDA_CHECK(cuda_kernels::clip_by_products(
        terms.const_data_ptr<double>(), static_cast<int>(terms.numel()), kl_clip,
        scale.mutable_data_ptr<double>(), c10::cuda::getCurrentCUDAStream()));
    return scale;
  }
#endif
  return terms.sum().abs().reciprocal().mul(kl_clip).sqrt().clamp_max(1.0);
}

}  // namespace torchium::optim::detail
