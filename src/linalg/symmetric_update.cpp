#include "linalg/symmetric_update.h"

#include "linalg/symmetric_storage.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::linalg::detail {
namespace {

// A product is cut into row panels that stop at the diagonal. Panels of fewer rows than this run
// at a lower rate than they save.
constexpr int64_t kPanelRows = 128;
// Below this order one full product is as fast. Measured on two cores with MKL.
constexpr int64_t kMinPanelledOrder = 384;

// C <- beta C + alpha X Y, where the result is symmetric. `addmm_out` of MKL works on panels
// in place, whatever the leading dimensions.
void symmetric_addmm_(at::Tensor& C, const at::Tensor& X, const at::Tensor& Y, double beta,
                      double alpha) {
  const int64_t n = C.size(1);
  if (!C.is_cpu() || n < kMinPanelledOrder) {
    C.baddbmm_(X, Y, beta, alpha);
    mirror_lower_(C);
    return;
  }
  for (int64_t matrix = 0; matrix < C.size(0); ++matrix) {
    for (int64_t row = 0; row < n; row += kPanelRows) {
      const int64_t rows = std::min(kPanelRows, n - row);
      C[matrix]
          .narrow(0, row, rows)
          .narrow(1, 0, row + rows)
          .addmm_(X[matrix].narrow(0, row, rows), Y[matrix].narrow(1, 0, row + rows), beta, alpha);
    }
  }
  mirror_lower_(C);
}

}  // namespace

void symmetric_update_(at::Tensor& C, const at::Tensor& X, double beta, double alpha) {
  symmetric_addmm_(C, X, X.mT(), beta, alpha);
}

void symmetric_product_out(at::Tensor& C, const at::Tensor& X, const at::Tensor& Y) {
  symmetric_addmm_(C, X, Y, 0.0, 1.0);
}

}  // namespace torchium::linalg::detail
