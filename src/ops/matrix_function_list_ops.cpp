// The operators of torchium/linalg/matrix_functions.h on lists of batches: compositions of those on
// one batch, to which all batches of one order, dtype and device are joined.
#include "linalg/common/operand_checks.h"
#include "linalg/matrix_functions/matrix_groups.h"
#include "ops/find_operator.h"
#include "ops/registration.h"
#include <torchium/linalg/matrix_functions.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::ops {
namespace {

using at::Tensor;
using linalg::InverseRootInfo;
using linalg::InverseRootOptions;
using Tensors = std::vector<Tensor>;
using InfoLists = std::tuple<Tensors, Tensors, Tensors, Tensors>;
using EighLists = std::tuple<Tensors, Tensors>;

// Here, so that an error names the entry.
void check_entries(const char* op, at::TensorList A) {
  for (size_t i = 0; i < A.size(); ++i) {
    const std::string name = "A[" + std::to_string(i) + "]";
    linalg::detail::check_floating(op, {name.c_str(), A[i]});
    linalg::detail::check_square(op, {name.c_str(), A[i]});
  }
}

void refuse_gradients(const char* op, at::TensorList A, const char* remedy) {
  for (size_t i = 0; i < A.size() && c10::GradMode::is_enabled(); ++i) {
    TORCH_CHECK(!A[i].requires_grad(), op, " has no derivative, but A[", i, "] requires grad. ",
                remedy);
  }
}

// solve: [N, n, n] -> results [N, ...] of all matrices of one group. Returns each of the results
// for each entry of A.
template <size_t results, typename Solve>
std::array<Tensors, results> solve_each_order(at::TensorList A, const Solve& solve) {
  std::array<Tensors, results> all;
  all.fill(Tensors(A.size()));
  for (const auto& group : linalg::detail::group_by_order(A)) {
    const std::array<Tensor, results> solved = solve(linalg::detail::joined_matrices(A, group));
    for (size_t k = 0; k < results; ++k) {
      Tensors parts = linalg::detail::split_by_buffer(solved[k], A, group);
      for (size_t i = 0; i < group.size(); ++i) {
        all[k][group[i]] = std::move(parts[i]);
      }
    }
  }
  return all;
}

constexpr char kRootListRemedy[] = "Use matrix_power(A, -1.0 / root, ...), or detach it.";
constexpr char kEighListRemedy[] = "Use torch.linalg.eigh, or detach it.";

Tensors inverse_roots(at::TensorList A, int64_t root, double eps, double relative_eps,
                      c10::string_view method) {
  check_entries("matrix_inverse_root", A);
  refuse_gradients("matrix_inverse_root", A, kRootListRemedy);
  const InverseRootOptions options{eps, relative_eps, std::string(method)};
  return std::get<0>(solve_each_order<1>(A, [&](const Tensor& batch) {
    return std::array{linalg::matrix_inverse_root(batch, root, options)};
  }));
}

InfoLists inverse_roots_info(at::TensorList A, int64_t root, double eps, double relative_eps,
                             c10::string_view method) {
  check_entries("matrix_inverse_root", A);
  refuse_gradients("matrix_inverse_root", A, kRootListRemedy);
  const InverseRootOptions options{eps, relative_eps, std::string(method)};
  return std::tuple_cat(solve_each_order<4>(A, [&](const Tensor& batch) {
    const InverseRootInfo info = linalg::matrix_inverse_root_info(batch, root, options);
    return std::array{info.root, info.residual, info.iterations, info.floor};
  }));
}

Tensors powers(at::TensorList A, double exponent, double eps, double relative_eps) {
  check_entries("matrix_power", A);
  return std::get<0>(solve_each_order<1>(A, [&](const Tensor& batch) {
    return std::array{linalg::matrix_power(batch, exponent, eps, relative_eps)};
  }));
}

EighLists eigensystems(at::TensorList A) {
  check_entries("eigh", A);
  refuse_gradients("eigh", A, kEighListRemedy);
  return std::tuple_cat(solve_each_order<2>(A, [](const Tensor& batch) {
    const auto [values, vectors] = linalg::eigh(batch);
    return std::array{values, vectors};
  }));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  define_composite(
      m,
      "matrix_inverse_root.list(Tensor[] A, int root, *, float eps=0.0, float relative_eps=0.0, "
      "str method=\"auto\") -> Tensor[]",
      inverse_roots);
  define_composite(
      m,
      "matrix_inverse_root_info.list(Tensor[] A, int root, *, float eps=0.0, float "
      "relative_eps=0.0, str method=\"auto\") -> (Tensor[] root, Tensor[] residual, Tensor[] "
      "iterations, Tensor[] floor)",
      inverse_roots_info);
  define_composite(m, "eigh.list(Tensor[] A) -> (Tensor[] eigenvalues, Tensor[] eigenvectors)",
                   eigensystems);
  define_composite(
      m,
      "matrix_power.list(Tensor[] A, float exponent, *, float eps=0.0, float relative_eps=0.0) -> "
      "Tensor[]",
      powers);
}

}  // namespace torchium::ops

namespace torchium::linalg {

std::vector<at::Tensor> matrix_inverse_root(at::TensorList A, int64_t root,
                                            const InverseRootOptions& options) {
  return ops::call_operator<&ops::inverse_roots>("matrix_inverse_root.list", A, root, options.eps,
                                                 options.relative_eps, options.method);
}

std::vector<InverseRootInfo> matrix_inverse_root_info(at::TensorList A, int64_t root,
                                                      const InverseRootOptions& options) {
  const auto [roots, residuals, iterations, floors] = ops::call_operator<&ops::inverse_roots_info>(
      "matrix_inverse_root_info.list", A, root, options.eps, options.relative_eps, options.method);
  std::vector<InverseRootInfo> infos;
  for (size_t i = 0; i < roots.size(); ++i) {
    infos.push_back({roots[i], residuals[i], iterations[i], floors[i]});
  }
  return infos;
}

std::vector<at::Tensor> matrix_power(at::TensorList A, double exponent, double eps,
                                     double relative_eps) {
  return ops::call_operator<&ops::powers>("matrix_power.list", A, exponent, eps, relative_eps);
}

std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> eigh(at::TensorList A) {
  return ops::call_operator<&ops::eigensystems>("eigh.list", A);
}

}  // namespace torchium::linalg
