#include "linalg/kronecker/kronecker_lists.h"

#include "linalg/common/operand_checks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/kronecker/factor_product.h"
#include "linalg/common/element_type.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::FactorProduct;

bool is_plain_matrix(const at::Tensor& x) {
  return x.is_cuda() && x.dim() == 2 && x.numel() > 0 &&
         x.numel() <= std::numeric_limits<int>::max() && !x.is_neg();
}

// Launched when it is full and at the end.
class ProductTable {
 public:
  ProductTable(at::ScalarType A, at::ScalarType B, at::ScalarType C)
      : types_{*element_type(A), *element_type(B), *element_type(C)} {}

  void add(FactorProduct product) {
    if (table_.count == decltype(table_)::kCapacity) launch();
    product.first_tile = table_.end_tile;
    table_.end_tile +=
        static_cast<int>(cuda_kernels::factor_product_tiles(product.rows, product.columns));
    table_.entries[table_.count++] = product;
  }

  void launch() {
    if (table_.count == 0) return;
    C10_CUDA_CHECK(
        cuda_kernels::factor_products(table_, types_, c10::cuda::getCurrentCUDAStream()));
    table_.count = 0;
    table_.end_tile = 0;
  }

 private:
  cuda_kernels::FactorProductTypes types_;
  cuda_kernels::Table<FactorProduct> table_;
};

// X as [nA, nB, k] and Y as [mA, nB, k]: Y[a, j, :] = sum_i A[a, i] X[i, j, :].
FactorProduct first_product(const at::Tensor& A, int64_t nB, const at::Tensor& X, void* Y) {
  const int64_t columns = nB * X.size(1);
  return {.A = A.const_data_ptr(),
          .B = X.const_data_ptr(),
          .C = Y,
          .A_row = A.stride(0),
          .A_term = A.stride(1),
          .B_row = columns,
          .B_outer = 0,
          .C_row = columns,
          .C_outer = 0,
          .rows = static_cast<int>(A.size(0)),
          .terms = static_cast<int>(A.size(1)),
          .columns = static_cast<int>(columns),
          .inner = static_cast<int>(columns),
          .first_tile = 0};
}

// Z as [mA, mB, k]: Z[a, b, :] = sum_j B[b, j] Y[a, j, :]. The columns are the pairs (a, k).
FactorProduct second_product(const at::Tensor& B, int64_t mA, int64_t k, const void* Y,
                             const at::Tensor& Z) {
  return {.A = B.const_data_ptr(),
          .B = Y,
          .C = Z.mutable_data_ptr(),
          .A_row = B.stride(0),
          .A_term = B.stride(1),
          .B_row = k,
          .B_outer = B.size(1) * k,
          .C_row = k,
          .C_outer = B.size(0) * k,
          .rows = static_cast<int>(B.size(0)),
          .terms = static_cast<int>(B.size(1)),
          .columns = static_cast<int>(mA * k),
          .inner = static_cast<int>(k),
          .first_tile = 0};
}

// The pairs `which`, of one dtype on one device.
void multiply_pairs(at::TensorList A, at::TensorList B, at::TensorList X,
                    const std::vector<size_t>& which, std::vector<at::Tensor>& results) {
  const at::Tensor& any = X[which.front()];
  const c10::cuda::CUDAGuard device_guard(any.device());
  torchium::detail::check_device_code(any.device());
  const at::ScalarType dtype = any.scalar_type(), sums = compute_dtype(any);
  int64_t elements = 0;
  for (const size_t i : which) elements += A[i].size(0) * B[i].size(1) * X[i].size(1);
  const at::Tensor workspace = at::empty({elements}, any.options().dtype(sums));

  std::vector<at::Tensor> rows;  // X, contiguous
  ProductTable first(dtype, dtype, sums), second(dtype, sums, dtype);
  auto* Y = static_cast<char*>(workspace.mutable_data_ptr());
  for (const size_t i : which) {
    rows.push_back(X[i].contiguous());
    first.add(first_product(A[i], B[i].size(1), rows.back(), Y));
    Y += A[i].size(0) * B[i].size(1) * X[i].size(1) * workspace.element_size();
  }
  first.launch();
  Y = static_cast<char*>(workspace.mutable_data_ptr());
  for (const size_t i : which) {
    const int64_t mA = A[i].size(0), k = X[i].size(1);
    results[i] = at::empty({mA * B[i].size(0), k}, X[i].options());
    second.add(second_product(B[i], mA, k, Y, results[i]));
    Y += mA * B[i].size(1) * k * workspace.element_size();
  }
  second.launch();
}

}  // namespace

bool has_kron_kernel(at::TensorList A, at::TensorList B, at::TensorList X) {
  for (size_t i = 0; i < X.size(); ++i) {
    if (!is_plain_matrix(A[i]) || !is_plain_matrix(B[i]) || !is_plain_matrix(X[i])) return false;
    // All indices and tiles are 32-bit integers.
    const int64_t k = X[i].size(1);
    const int64_t largest = std::max(A[i].size(0) * B[i].size(1), A[i].size(0) * B[i].size(0)) * k;
    if (largest > std::numeric_limits<int>::max()) return false;
  }
  return !X.empty();
}

std::vector<at::Tensor> kron_matmul_by_kernel(at::TensorList A, at::TensorList B,
                                              at::TensorList X) {
  std::map<std::pair<at::ScalarType, c10::DeviceIndex>, std::vector<size_t>> kinds;
  for (size_t i = 0; i < X.size(); ++i) {
    kinds[{X[i].scalar_type(), X[i].device().index()}].push_back(i);
  }
  std::vector<at::Tensor> results(X.size());
  for (const auto& [kind, which] : kinds) multiply_pairs(A, B, X, which, results);
  return results;
}

#else

bool has_kron_kernel(at::TensorList A, at::TensorList B, at::TensorList X) { return false; }

std::vector<at::Tensor> kron_matmul_by_kernel(at::TensorList A, at::TensorList B,
                                              at::TensorList X) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::linalg::detail
