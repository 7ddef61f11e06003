// kron_matmul and kron_solve on lists of pairs: compositions of those on one batch of pairs, which
// all pairs of the same shapes are joined to. Products of CUDA tensors take a kernel for all
// shapes.
#include "linalg/common/operand_checks.h"
#include "linalg/kronecker/kronecker_lists.h"
#include "ops/derivative.h"
#include "ops/find_operator.h"
#include "ops/registration.h"
#include <torchium/linalg/products.h>

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

namespace torchium::ops {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Pairs {
  const char* name;
  at::TensorList A, B, X;
};

// Here, so that an error names the entry.
void check_pairs(const Pairs& pairs) {
  const auto& [name, A, B, X] = pairs;
  TORCH_CHECK_VALUE(A.size() == X.size() && B.size() == X.size(), name, ": A, B and X have ",
                    A.size(), ", ", B.size(), " and ", X.size(),
                    " entries; they must be lists of one length.");
  for (size_t i = 0; i < X.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    const std::string names[] = {"A" + index, "B" + index, "X" + index};
    linalg::detail::check_matrices(
        name, {{names[0].c_str(), A[i]}, {names[1].c_str(), B[i]}, {names[2].c_str(), X[i]}});
    const c10::SymInt rows = A[i].sym_size(-1) * B[i].sym_size(-1);
    linalg::detail::broadcast_batch(
        name, {{names[0].c_str(), A[i]}, {names[1].c_str(), B[i]}, {names[2].c_str(), X[i]}});
    TORCH_CHECK_VALUE(X[i].sym_size(-2) == rows, name, ": ", names[2], " has shape ",
                      X[i].sym_sizes(), "; with ", names[0], " ", A[i].sym_sizes(), " and ",
                      names[1], " ", B[i].sym_sizes(), " it must be [..., ", rows, ", k]");
  }
}

bool are_alike(const Tensor& x, const Tensor& y) {
  return x.sym_sizes() == y.sym_sizes() && x.scalar_type() == y.scalar_type() &&
         x.device() == y.device();
}

// x with ones before its sizes, of `dim` dimensions: they broadcast as before.
Tensor with_dimensions(const Tensor& x, int64_t dim) {
  std::vector<c10::SymInt> sizes(dim - x.dim(), 1);
  sizes.insert(sizes.end(), x.sym_sizes().begin(), x.sym_sizes().end());
  return x.view_symint(sizes);
}

// multiply(A, B, X) of all pairs with the same shapes, dtype and device at once.
template <typename Multiply>
Tensors each_shape(const Pairs& pairs, const Multiply& multiply) {
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < pairs.X.size(); ++i) {
    const auto fits = [&](const std::vector<size_t>& group) {
      const size_t j = group.front();
      return are_alike(pairs.A[i], pairs.A[j]) && are_alike(pairs.B[i], pairs.B[j]) &&
             are_alike(pairs.X[i], pairs.X[j]);
    };
    const auto found = std::find_if(groups.begin(), groups.end(), fits);
    if (found == groups.end()) {
      groups.push_back({i});
    } else {
      found->push_back(i);
    }
  }

  Tensors results(pairs.X.size());
  for (const auto& group : groups) {
    const size_t first = group.front();
    if (group.size() == 1) {
      results[first] = multiply(pairs.A[first], pairs.B[first], pairs.X[first]);
      continue;
    }
    const int64_t dim =
        std::max({pairs.A[first].dim(), pairs.B[first].dim(), pairs.X[first].dim()});
    const auto joined = [&](at::TensorList list) {
      Tensors entries;
      for (const size_t i : group) entries.push_back(with_dimensions(list[i], dim));
      return at::stack(entries);
    };
    const Tensors parts = multiply(joined(pairs.A), joined(pairs.B), joined(pairs.X)).unbind(0);
    for (size_t k = 0; k < group.size(); ++k) results[group[k]] = parts[k];
  }
  return results;
}

// Tensors that are what they seem, of which no derivative is asked.
bool are_plain(const Pairs& pairs) {
  Tensors all;
  for (const at::TensorList list : {pairs.A, pairs.B, pairs.X}) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return !at::areAnyTensorSubclassLike(all) && !needs_derivative(all);
}

Tensors kron_matmul_list(at::TensorList A, at::TensorList B, at::TensorList X) {
  const Pairs pairs{"kron_matmul", A, B, X};
  check_pairs(pairs);
  if (are_plain(pairs) && linalg::detail::has_kron_kernel(A, B, X)) {
    return linalg::detail::kron_matmul_by_kernel(A, B, X);
  }
  return each_shape(pairs, [](const Tensor& A, const Tensor& B, const Tensor& X) {
    return linalg::kron_matmul(A, B, X);
  });
}

Tensors kron_solve_list(at::TensorList A, at::TensorList B, at::TensorList X, double damping) {
  const Pairs pairs{"kron_solve", A, B, X};
  check_pairs(pairs);
  return each_shape(pairs, [=](const Tensor& A, const Tensor& B, const Tensor& X) {
    return linalg::kron_solve(A, B, X, damping);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  define_composite(m, "kron_matmul.list(Tensor[] A, Tensor[] B, Tensor[] X) -> Tensor[]",
                   kron_matmul_list);
  define_composite(m,
                   "kron_solve.list(Tensor[] A, Tensor[] B, Tensor[] X, float damping) -> Tensor[]",
                   kron_solve_list);
}

}  // namespace torchium::ops

namespace torchium::linalg {

std::vector<at::Tensor> kron_matmul(at::TensorList A, at::TensorList B, at::TensorList X) {
  return ops::call_operator<&ops::kron_matmul_list>("kron_matmul.list", A, B, X);
}

std::vector<at::Tensor> kron_solve(at::TensorList A, at::TensorList B, at::TensorList X,
                                   double damping) {
  return ops::call_operator<&ops::kron_solve_list>("kron_solve.list", A, B, X, damping);
}

}  // namespace torchium::linalg
