#include "linalg/spectral/eigh.h"

#include "linalg/common/precision.h"
#include "linalg/spectral/batched_syev.h"
#include "linalg/spectral/checked_eigh.h"
#include "linalg/spectral/divide_and_conquer.h"
#include "linalg/spectral/serial_lapack.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace torchium::linalg::detail {
namespace {

// Whether one matrix per thread beats one matrix at a time with a threaded LAPACK. LAPACK
// gains nothing from threads for small orders and little for large ones: on two cores 1.0 at
// n = 128, 1.24 at 256, 1.45 at 512, 1.7 at 784.
bool one_matrix_per_thread(int64_t matrices, int64_t n) {
  const int64_t threads = at::get_num_threads();
  const double speedup = std::min(static_cast<double>(threads), 1.0 + n / 1200.0);
  const int64_t rounds = (matrices + threads - 1) / threads;
  return matrices > 1 && SerialLapack::is_possible() &&
         static_cast<double>(rounds) < static_cast<double>(matrices) / speedup;
}

}  // namespace

Eigensystem symmetric_eigensystem(const at::Tensor& S) {
  const int64_t matrices = S.size(0);
  const int64_t n = S.size(-1);
  if (has_divide_and_conquer(S)) {
    return divide_and_conquer(S);
  }
  // LAPACK's layout, so that linalg_eigh_out writes in place.
  Eigensystem out{at::empty({matrices, n}, S.options()),
                  at::empty({matrices, n, n}, S.options()).mT()};
  if (S.numel() == 0) {
    return out;
  }
  if (has_batched_syev(S)) {
    out.vectors.copy_(S.mT());  // S is its own transpose
    batched_syev_(out.values, out.vectors);
    return out;
  }
  if (!S.is_cpu()) {
    at::linalg_eigh_out(out.values, out.vectors, S.mT());
    return out;
  }
  if (!one_matrix_per_thread(matrices, n)) {
    std::optional<SerialLapack> serial;
    if (n <= SerialLapack::kLargestOrder) {
      serial.emplace();
    }
    solve_checked(S, out.values, out.vectors);
    return out;
  }
  at::parallel_for(0, matrices, 1, [&](int64_t begin, int64_t end) {
    // A worker thread has its own dispatch state.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const SerialLapack serial;
    solve_checked(S.slice(0, begin, end), out.values.slice(0, begin, end),
                  out.vectors.slice(0, begin, end));
  });
  return out;
}

double eigenvalue_noise(int64_t n, at::ScalarType dtype) {
  return epsilon_of(dtype) * (4.0 + 0.25 * std::sqrt(static_cast<double>(n)));
}

}  // namespace torchium::linalg::detail
