#include "linalg/eigh.h"

#include "linalg/batched_syev.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace torchium::linalg::detail {
namespace {

// Whether one matrix a thread beats one matrix after the other with a threaded LAPACK. LAPACK
// gains nothing from threads for small orders and little for large ones: on two cores 1.0 at
// n = 128, 1.24 at 256, 1.45 at 512, 1.7 at 784.
bool one_matrix_per_thread(int64_t matrices, int64_t n) {
  const int64_t threads = at::get_num_threads();
  const double speedup = std::min(static_cast<double>(threads), 1.0 + n / 1200.0);
  const int64_t rounds = (matrices + threads - 1) / threads;
  return matrices > 1 && static_cast<double>(rounds) < static_cast<double>(matrices) / speedup;
}

void solve(const at::Tensor& S, Eigensystem& out);

void solve_range(const at::Tensor& S, Eigensystem& out, int64_t begin, int64_t end) {
  Eigensystem range{out.values.slice(0, begin, end), out.vectors.slice(0, begin, end)};
  solve(S.slice(0, begin, end), range);
}

// Into `out`, whose layout is LAPACK's.
void solve(const at::Tensor& S, Eigensystem& out) {
  try {
    // S is its own transpose; in LAPACK's layout it is copied without transposing.
    at::linalg_eigh_out(out.values, out.vectors, S.mT());
  } catch (const c10::LinAlgError&) {
    if (S.size(0) == 1) {
      out.values.fill_(std::numeric_limits<double>::quiet_NaN());
      out.vectors.fill_(std::numeric_limits<double>::quiet_NaN());
      return;
    }
    for (int64_t i = 0; i < S.size(0); ++i) {
      solve_range(S, out, i, i + 1);
    }
  }
}

}  // namespace

Eigensystem symmetric_eigensystem(const at::Tensor& S) {
  const int64_t matrices = S.size(0);
  const int64_t n = S.size(-1);
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
  if (!S.is_cpu() || !one_matrix_per_thread(matrices, n)) {
    solve(S, out);
    return out;
  }
  at::parallel_for(0, matrices, 1, [&](int64_t begin, int64_t end) {
    // A worker thread has its own dispatch state.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    solve_range(S, out, begin, end);
  });
  return out;
}

double eigenvalue_noise(int64_t n, at::ScalarType dtype) {
  const double unit = dtype == at::kFloat ? std::numeric_limits<float>::epsilon()
                                          : std::numeric_limits<double>::epsilon();
  return unit * (4.0 + 0.25 * std::sqrt(static_cast<double>(n)));
}

}  // namespace torchium::linalg::detail
