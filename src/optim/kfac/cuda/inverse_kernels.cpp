#include "optim/kfac/cuda/inverse_kernels.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/kfac_inverses.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"
#include "support/device_code.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cmath>
#endif

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::DampingEntry;
using cuda_kernels::InverseEntry;

// One factor of a layer. The results are as the kernel reads them, and live until it is launched.
InverseEntry inverse_entry(const KfacLayer& layer, DampedFactor& factor, const at::Tensor& root,
                           const at::Tensor& eigenvalues, const DampedFactor& other, int index) {
  factor.root = factor.root.to(at::kFloat).contiguous();
  const bool has_values = eigenvalues.defined();
  if (has_values) {
    factor.eigenvalues = factor.eigenvalues.contiguous();
  }
  return {.root = floats(root),
          .new_root = factor.root.const_data_ptr<float>(),
          .eigenvalues = floats(eigenvalues),
          .new_eigenvalues = has_values ? factor.eigenvalues.const_data_ptr<double>() : nullptr,
          .accepted = factor.accepted.const_data_ptr<bool>(),
          .other = other.accepted.const_data_ptr<bool>(),
          .failures = layer.root_failures.mutable_data_ptr<int>() + index,
          .floor = layer.floor,
          .elements = root.numel() / root.size(0),
          .groups = static_cast<int>(root.size(0)),
          .order = static_cast<int>(root.size(1)),
          .first_tile = 0};
}

}  // namespace

bool has_inverse_kernels(const KfacLayer& layer) {
  const auto fits = [](const at::Tensor& tensor) {
    return !tensor.defined() || tensor.is_contiguous();
  };
  return layer.A.is_cuda() && layer.A.scalar_type() == at::kFloat && layer.A.numel() > 0 &&
         layer.G.numel() > 0 &&
         std::ranges::all_of(
             std::initializer_list<at::Tensor>{layer.A, layer.G, layer.A_root, layer.G_root,
                                               layer.A_eigenvalues, layer.G_eigenvalues,
                                               layer.root_failures},
             fits);
}

void set_dampings_by_kernel(const std::vector<DampedFactors*>& all, DampingSplit split) {
  if (all.empty() || split == DampingSplit::kExact) {
    return;
  }
  int64_t count = 0;
  for (const DampedFactors* each : all) {
    count += 2 * each->layer->A.size(0);
  }
  const at::Tensor dampings = at::empty({count}, all[0]->layer->A.options().dtype(at::kDouble));
  torchium::detail::check_device_code(dampings.device());
  KernelTables<DampingEntry> tables;
  int64_t place = 0;
  for (DampedFactors* each : all) {
    const KfacLayer& layer = *each->layer;
    const int64_t groups = layer.A.size(0);
    for (DampedFactor* factor : {&each->A, &each->G}) {
      factor->damping = dampings.narrow(0, place, groups);
      place += groups;
    }
    tables.add({.A = floats(each->A.matrices),
                .G = floats(each->G.matrices),
                .A_damping = each->A.damping.mutable_data_ptr<double>(),
                .G_damping = each->G.damping.mutable_data_ptr<double>(),
                .root_damping = std::sqrt(layer.damping),
                .floor = layer.floor,
                .A_order = static_cast<int>(layer.A.size(1)),
                .G_order = static_cast<int>(layer.G.size(1)),
                .A_is_diagonal = layer.A.dim() == 2,
                .G_is_diagonal = layer.G.dim() == 2,
                .first_tile = 0},
               static_cast<int>(groups));
  }
  for (const auto& table : tables) {
    C10_CUDA_CHECK(cuda_kernels::damp_factors(table, split == DampingSplit::kPi,
                                              c10::cuda::getCurrentCUDAStream()));
  }
}

void take_accepted_by_kernel(const std::vector<DampedFactors*>& all, const FoundInfGuard& guard) {
  KernelTables<InverseEntry> tables;
  const auto add = [&](const InverseEntry& entry) {
    const int64_t elements = entry.groups * entry.elements;
    tables.add(entry, static_cast<int>((elements + cuda_kernels::kInverseTile - 1) /
                                       cuda_kernels::kInverseTile));
  };
  for (DampedFactors* each : all) {
    const KfacLayer& layer = *each->layer;
    add(inverse_entry(layer, each->A, layer.A_root, layer.A_eigenvalues, each->G, 0));
    add(inverse_entry(layer, each->G, layer.G_root, layer.G_eigenvalues, each->A, 1));
  }
  const bool* keep = guard.keep().defined() ? guard.keep().const_data_ptr<bool>() : nullptr;
  for (const auto& table : tables) {
    C10_CUDA_CHECK(cuda_kernels::take_inverses(table, keep, c10::cuda::getCurrentCUDAStream()));
  }
  for (const DampedFactors* each : all) {
    const KfacLayer& layer = *each->layer;
    for (const auto& tensor : {layer.A_root, layer.G_root, layer.A_eigenvalues, layer.G_eigenvalues,
                               layer.root_failures}) {
      note_change(tensor);
    }
  }
}

#else

bool has_inverse_kernels(const KfacLayer&) { return false; }
void set_dampings_by_kernel(const std::vector<DampedFactors*>&, DampingSplit) {}
void take_accepted_by_kernel(const std::vector<DampedFactors*>&, const FoundInfGuard&) {}
#endif

}  // namespace torchium::optim::detail
