#include "linalg/krylov/krylov_process.h"

#include "linalg/common/operator_checks.h"
#include "linalg/common/precision.h"
#include "linalg/common/random_signs.h"
#include "linalg/krylov/device_ritz_pairs.h"
#include "linalg/structured/dense.h"
#include "linalg/structured/dense_product.h"
#include "support/derivatives.h"
#include "support/no_autocast.h"
#include "support/no_transforms.h"
#include "support/warn.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

namespace torchium::linalg::detail {
namespace {

// Residuals, in units of epsilon and the largest eigenvalue, that may be rounding errors.
constexpr double kRoundingErrors = 100.0;
// The same of the errors that each restart adds: it is computed in float64.
constexpr double kRestartRounding = 100.0 * std::numeric_limits<double>::epsilon();
// Eigenpairs of a matrix that is not smaller.
constexpr int64_t kDefaultPairs = 6;

// Columns of the basis at the first check: a few per wanted pair, and two blocks.
int64_t columns_at_first_check(int64_t k, int64_t block) { return 3 * k + 2 * block; }

// Products that a device is given before the host waits for what a check needs: they take at least
// as long as the check.
constexpr int64_t kStepsAhead = 4;

// By how much the residuals fall between two full bases, at most.
constexpr double kFallOfRestart = 100.0;

const char* method_name(bool symmetric) { return symmetric ? "lanczos" : "arnoldi"; }

// Columns of a product by which a GPU reads a dense float32 matrix no slower than by one. In
// float64 the many small operations of a block take longer than they save.
constexpr int64_t kDenseBlock = 8;

int64_t block_size(const KrylovOptions& options, bool is_dense,
                   const at::TensorOptions& tensor_options) {
  if (options.block_size) return *options.block_size;
  if (options.start.defined()) return options.start.dim() == 2 ? options.start.size(1) : 1;
  const bool is_float = c10::typeMetaToScalarType(tensor_options.dtype()) == at::kFloat;
  return is_dense && is_float && tensor_options.device().is_cuda() ? kDenseBlock : 1;
}

// With fewer than ten blocks, a Krylov space of blocks has polynomials of too low a degree.
int64_t basis_size(const char* name, int64_t k, int64_t block, const KrylovOptions& options) {
  const int64_t least = k + 2 * block;
  const int64_t size =
      options.max_basis.value_or(std::max({2 * k + 1, int64_t{20}, 10 * block}) + 2 * block);
  TORCH_CHECK_VALUE(size >= least, name, ": max_basis is ", size, "; it must be at least k + 2 ",
                    "block_size = ", least, ".");
  return size;
}

void check_options(bool symmetric, int64_t n, int64_t k, int64_t block,
                   const KrylovOptions& options) {
  const char* name = method_name(symmetric);
  const std::set<std::string> known = symmetric ? std::set<std::string>{"LA", "SA", "LM"}
                                                : std::set<std::string>{"LM", "LR", "SR", "LI"};
  TORCH_CHECK_VALUE(k > 0 && k <= n, name, ": k is ", k, "; it must be between 1 and n = ", n, ".");
  TORCH_CHECK_VALUE(known.count(options.which) == 1, name, ": which is \"", options.which,
                    "\"; it must be ",
                    symmetric ? "\"LA\", \"SA\" or \"LM\"." : "\"LM\", \"LR\", \"SR\" or \"LI\".");
  check_positive(name, "block_size", block);
  TORCH_CHECK_VALUE(options.max_restarts >= 0, name, ": max_restarts is ", options.max_restarts,
                    "; it must not be negative.");
  const double tol = options.tol.value_or(0.0);
  TORCH_CHECK_VALUE(tol >= 0 && std::isfinite(tol), name, ": tol is ", tol,
                    "; it must be finite and not negative.");
}

// Tensors of the host in the dtype, or its complex one, on the device, by one copy.
std::vector<at::Tensor> sent_together(const std::vector<at::Tensor>& tensors,
                                      const at::TensorOptions& options) {
  std::vector<at::Tensor> numbers;
  int64_t count = 0;
  for (const at::Tensor& x : tensors) {
    numbers.push_back(x.is_complex() ? at::view_as_real(x.resolve_conj()) : x);
    count += numbers.back().numel();
  }
  const bool is_cpu = options.device().is_cpu();
  const at::Tensor packed = at::empty({count}, options.device(at::kCPU).pinned_memory(!is_cpu));
  std::vector<at::Tensor> parts;
  for (const at::Tensor& x : numbers) {
    const int64_t begin = parts.empty() ? 0 : parts.back().storage_offset() + parts.back().numel();
    parts.push_back(packed.narrow(0, begin, x.numel()).view(x.sizes()));
    parts.back().copy_(x);
  }
  const at::Tensor sent = is_cpu ? packed : packed.to(options.device(), /*non_blocking=*/true);
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor part =
        sent.narrow(0, parts[i].storage_offset(), parts[i].numel()).view(parts[i].sizes());
    result.push_back(tensors[i].is_complex() ? at::view_as_complex(part) : part);
  }
  return result;
}

}  // namespace

KrylovProcess::KrylovProcess(bool symmetric, int64_t n, std::optional<int64_t> k,
                             const KrylovOptions& options, bool is_dense,
                             const at::TensorOptions& tensor_options)
    : OperatorProcess(symmetric ? "torchium::lanczos" : "torchium::arnoldi"),
      symmetric_(symmetric),
      n_(n),
      k_(k.value_or(std::min(kDefaultPairs, n))),
      block_(block_size(options, is_dense, tensor_options)),
      options_(options),
      tensor_options_(tensor_options),
      checks_late_(is_dense && tensor_options.device().is_cuda()) {
  check_operator(method_name(symmetric), n, tensor_options);
  if (options_.which.empty()) {
    options_.which = symmetric ? "LA" : "LM";
  }
  check_options(symmetric, n, k_, block_, options_);
  epsilon_ = epsilon_of(c10::typeMetaToScalarType(tensor_options.dtype()));
  tol_ = options_.tol.value_or(std::pow(epsilon_, 2.0 / 3.0));
  // A general eigenproblem takes the host long: it is solved when the basis is full.
  next_check_ = symmetric ? (columns_at_first_check(k_, block_) + block_ - 1) / block_
                          : std::numeric_limits<int64_t>::max();
  const int64_t capacity = basis_size(method_name(symmetric), k_, block_, options_);
  const torchium::detail::NoAutocast no_autocast;
  const at::Tensor first = start();
  const torchium::detail::NoTransforms no_transforms;
  // A small operator is formed: its Krylov space may be the whole space.
  if (n > capacity + block_) {
    space_ = std::make_unique<KrylovSpace>(first, capacity, options_.seed);
  }
}

at::Tensor KrylovProcess::start() const {
  if (!options_.start.defined()) {
    return random_signs(n_, std::min(block_, n_), options_.seed, 0, tensor_options_);
  }
  const at::Tensor& given = options_.start;
  const bool fits = given.scalar_type() == c10::typeMetaToScalarType(tensor_options_.dtype()) &&
                    given.device() == tensor_options_.device();
  const at::Tensor start = (given.dim() == 1 ? given.unsqueeze(1) : given).detach();
  TORCH_CHECK_VALUE(fits && start.dim() == 2 && start.size(0) == n_ && start.size(1) == block_,
                    method_name(symmetric_), ": start is ", given.sizes(), " of ",
                    given.scalar_type(), " on ", given.device(), "; it must be [", n_, ", ", block_,
                    "], of the operator's dtype and device.");
  TORCH_CHECK_VALUE(at::isfinite(start).all().item<bool>(), method_name(symmetric_),
                    ": start is not finite.");
  return torchium::detail::levels_of(start).back();
}

at::Tensor KrylovProcess::next_operand() {
  if (!result_.empty()) return {};
  return solves_densely() ? at::eye(n_, tensor_options_) : space_->operand();
}

// The first product reads all of a dense matrix, so that the projection shows whether the triangles
// differ.
at::Tensor KrylovProcess::product(const LinearOperator& A, const at::Tensor& X) const {
  const auto* dense = symmetric_ && steps_ > 0 ? node_as<DenseNode>(A) : nullptr;
  return dense != nullptr ? symmetric_dense_product(dense->A, X) : A.matmul(X);
}

void KrylovProcess::use(const at::Tensor& /*operand*/, const at::Tensor& given) {
  const at::Tensor product = in_units(given);
  if (solves_densely()) {
    solve_densely(product);
    return;
  }
  space_->extend(product);
  ++steps_;
  if (space_->is_full()) {
    late_.reset();  // its check would only delay this one
    if (!finish_on_device() && !check(snapshot())) restart();
    return;
  }
  if (late_ && steps_ >= late_->step + kStepsAhead) {
    const std::optional<Snapshot> late = std::exchange(late_, std::nullopt);
    if (check(*late)) return;
  }
  if (!late_ && steps_ >= next_check_) {
    if (checks_late_) {
      late_ = snapshot();
    } else {
      check(snapshot());
    }
  }
}

KrylovProcess::Snapshot KrylovProcess::snapshot() const {
  const at::Tensor projection = space_->projection();
  Snapshot result{projection, c10::Event(tensor_options_.device().type()), steps_};
  if (!projection.is_cpu()) {
    result.projection =
        at::empty(projection.sizes(), projection.options().device(at::kCPU).pinned_memory(true));
    result.projection.copy_(projection, /*non_blocking=*/true);
    const c10::impl::VirtualGuardImpl guard(projection.device().type());
    result.arrival.record(guard.getStream(projection.device()));
  }
  return result;
}

void KrylovProcess::check_projection(const at::Tensor& H) const {
  const char* name = method_name(symmetric_);
  const double norm = H.norm().item<double>();
  TORCH_CHECK_VALUE(std::isfinite(norm) || at::isfinite(H).all().item<bool>(), name,
                    ": a product of the operator is not finite.");
  if (symmetric_) {
    const double asymmetry = (H - H.mT()).norm().item<double>() / 2;
    TORCH_CHECK_VALUE(is_symmetric(asymmetry, norm), name,
                      ": the operator is not symmetric: |H - H^T| / 2 is ", asymmetry,
                      " for a projection H of norm ", norm, "; use arnoldi.");
  }
}

void KrylovProcess::solve_densely(const at::Tensor& A) {
  const at::Tensor H = A.to(at::kCPU, at::kDouble);
  check_projection(H);
  finish(ritz_pairs(H, at::zeros({1, n_}, H.options()), k_, symmetric_, options_.which));
}

// Whether the pairs have converged, or are rounding errors that do not fall any more: each restart
// adds some to them. The next check is due when half of the steps are done that are
// missing if the residual falls as since the last check; it mostly falls faster.
bool KrylovProcess::has_converged(const RitzPairs& pairs, int64_t step) {
  const double unit = pairs.values.abs().max().item<double>();
  const double residual = pairs.residuals.max().item<double>();
  if (residual <= tol_ * unit) return true;
  const double relative = residual / unit;
  const double noise =
      kRoundingErrors * epsilon_ +
      std::min(restart_error_ / unit, kRestartRounding * static_cast<double>(restarts_));
  if (step > last_step_ && relative >= last_residual_ && relative <= noise) {
    tol_ = std::max(tol_, noise);
    return true;
  }
  const double fall = std::log(last_residual_ / relative) / static_cast<double>(step - last_step_);
  const double left = std::log(relative / std::max(tol_, epsilon_));
  const double most = static_cast<double>(step) / 4;
  const double wait = fall > 0 ? std::min(left / fall / 2, most) : most;
  if (symmetric_) next_check_ = step + std::max<int64_t>(1, static_cast<int64_t>(wait));
  last_step_ = step;
  last_residual_ = relative;
  return false;
}

// Finishes and returns true if the pairs have converged, or no restart is left for a full basis.
bool KrylovProcess::check(const Snapshot& snapshot) {
  if (tensor_options_.device().type() != at::kCPU) snapshot.arrival.synchronize();
  const at::Tensor& projection = snapshot.projection;
  const int64_t size = projection.size(1);
  H_ = projection.narrow(0, 0, size);
  B_ = projection.narrow(0, size, block_);
  check_projection(H_);
  pairs_ = ritz_pairs(H_, B_, k_, symmetric_, options_.which);
  pairs_.residuals += restart_error_;
  const bool is_last = space_->is_full() && restarts_ == options_.max_restarts;
  if (size >= k_ && (has_converged(pairs_, snapshot.step) || is_last)) {
    finish(pairs_);
    return true;
  }
  return false;
}

bool KrylovProcess::is_symmetric(double asymmetry, double norm) const {
  return asymmetry <= 10 * std::sqrt(epsilon_) * norm;
}

// Where the pairs of a full basis may have converged, the device finds that out by itself: the host
// would take as long for the eigenproblem alone. Otherwise, what is wrong is for check() to say.
bool KrylovProcess::finish_on_device() {
  const bool is_hopeless = restarts_ > 0 && last_residual_ > kFallOfRestart * tol_;
  if (!symmetric_ || is_hopeless ||
      !has_device_ritz_pairs(space_->size(), options_.which, tensor_options_)) {
    return false;
  }
  const auto dtype = c10::typeMetaToScalarType(tensor_options_.dtype());
  const DeviceRitzPairs pairs = device_ritz_pairs(space_->projection(), k_, options_.which);
  std::vector<at::Tensor> result = {
      pairs.values.to(dtype), space_->combined(pairs.vectors.to(dtype)),
      (pairs.residuals + restart_error_).to(dtype),
      at::ones({k_}, tensor_options_.dtype(at::kBool))};  // on their way before the host waits
  const auto quality = pairs.quality();
  if (!(is_symmetric(quality.asymmetry, quality.norm) &&
        quality.residual + restart_error_ <= tol_ * quality.largest)) {
    return false;
  }
  result_ = std::move(result);
  space_.reset();
  return true;
}

void KrylovProcess::restart() {
  ++restarts_;
  const int64_t room = space_->size() - block_ - (symmetric_ ? 0 : 1);
  const int64_t kept = std::min(std::max(k_, space_->size() / 2), room);
  const RestartSpace next = restart_space(pairs_, H_, B_, kept);
  restart_error_ += next.error;
  space_->restart(next.basis, next.projection, next.coupling);
}

void KrylovProcess::finish(const RitzPairs& pairs) {
  const at::Tensor converged = pairs.residuals <= tol_ * pairs.values.abs().max();
  const int64_t missing = k_ - converged.sum().item<int64_t>();
  if (missing > 0) {
    torchium::detail::warn(method_name(symmetric_), ": ", missing, " of ", k_,
                           " eigenpairs have not converged in ", options_.max_restarts,
                           " restarts; raise max_basis or max_restarts, or tol (", tol_, ").");
  }
  const double unit = std::ldexp(1.0, exponent());
  const auto sent =
      sent_together({pairs.vectors.narrow(1, 0, k_), pairs.values.narrow(0, 0, k_) * unit,
                     pairs.residuals * unit, converged},
                    tensor_options_);
  const auto combined = [&](const at::Tensor& x) {
    return solves_densely() ? x : space_->combined(x);
  };
  const at::Tensor& small = sent[0];
  const at::Tensor vectors = small.is_complex()
                                 ? at::complex(combined(at::real(small)), combined(at::imag(small)))
                                 : combined(small);
  result_ = {sent[1], vectors, sent[2], sent[3].ne(0)};
  space_.reset();
}

std::vector<at::Tensor> KrylovProcess::make_result() { return result_; }

}  // namespace torchium::linalg::detail

namespace torchium::linalg {
namespace {

KrylovEigenpairs eigenpairs(bool symmetric, const LinearOperator& A, std::optional<int64_t> k,
                            const KrylovOptions& options) {
  detail::KrylovProcess process(symmetric, A.size(), k, options, A.is_dense(), A.options());
  const auto result = process.run(A);
  return {result[0], result[1], result[2], result[3], process.products()};
}

}  // namespace

KrylovEigenpairs lanczos(const LinearOperator& A, std::optional<int64_t> k,
                         const KrylovOptions& options) {
  return eigenpairs(true, A, k, options);
}

KrylovEigenpairs arnoldi(const LinearOperator& A, std::optional<int64_t> k,
                         const KrylovOptions& options) {
  return eigenpairs(false, A, k, options);
}

}  // namespace torchium::linalg
