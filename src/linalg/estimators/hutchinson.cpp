#include "linalg/estimators/hutchinson.h"

#include "linalg/common/operator_checks.h"
#include "linalg/common/random_signs.h"
#include "linalg/structured/split_dense.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace torchium::linalg::detail {
namespace {

// Products between tests, and columns of a product. Those of a dense matrix take less memory than
// the matrix, which is read as fast for all columns of a test as for a few.
constexpr int64_t kCallsPerTest = 10;
constexpr int64_t kColumns = 10, kColumnsOfDense = 256;

int64_t block_size(const HutchinsonOptions& options, bool is_dense) {
  const int64_t of_dense = options.tol.has_value() ? kCallsPerTest * kColumns : kColumnsOfDense;
  return options.block_size.value_or(is_dense ? of_dense : kColumns);
}

int64_t calls_per_test(const HutchinsonOptions& options, bool is_dense) {
  return is_dense && !options.block_size ? 1 : kCallsPerTest;
}

const char* estimator_name(bool diagonal) {
  return diagonal ? "hutchinson_diagonal" : "hutchinson_trace";
}

}  // namespace

void RunningMean::add(const at::Tensor& samples) {
  const int64_t added = samples.size(-1);
  const at::Tensor mean = samples.mean(-1);
  const at::Tensor squares = norms(samples - mean.unsqueeze(-1), -1).square();
  if (count_ == 0) {
    mean_ = mean;
    squares_ = squares;
  } else {
    const at::Tensor shift = mean - mean_;
    const double total = static_cast<double>(count_ + added);
    squares_ = squares_ + squares +
               shift.to(at::kDouble).square() *
                   (static_cast<double>(count_) * static_cast<double>(added) / total);
    mean_ = mean_ + shift * (static_cast<double>(added) / total);
  }
  count_ += added;
}

at::Tensor RunningMean::standard_error() const {
  const double samples = static_cast<double>(count_);
  return (squares_ / ((samples - 1) * samples)).sqrt().to(mean_.scalar_type());
}

HutchinsonProcess::HutchinsonProcess(bool diagonal, int64_t n, const HutchinsonOptions& options,
                                     bool is_dense, const at::TensorOptions& tensor_options)
    : OperatorProcess(diagonal ? "torchium::hutchinson_diagonal" : "torchium::hutchinson_trace"),
      diagonal_(diagonal),
      n_(n),
      options_(options),
      block_(block_size(options, is_dense)),
      calls_per_test_(calls_per_test(options, is_dense)),
      tensor_options_(tensor_options) {
  const char* name = estimator_name(diagonal);
  check_operator(name, n, tensor_options);
  check_positive(name, "num_samples", options.num_samples);
  check_positive(name, "block_size", block_);
  TORCH_CHECK_VALUE(!options.tol.has_value() || (*options.tol > 0 && std::isfinite(*options.tol)),
                    name, ": tol is ", options.tol.value_or(0.0),
                    "; it must be positive and finite, or not given.");
}

LinearOperator HutchinsonProcess::prepared(const LinearOperator& A) const {
  const int64_t least = options_.tol ? std::min(calls_per_test_ * block_, options_.num_samples)
                                     : options_.num_samples;
  return prepared_for(A, {std::min(block_, options_.num_samples), least});
}

at::Tensor HutchinsonProcess::next_operand() {
  if (done_) return {};
  const int64_t columns = std::min(block_, options_.num_samples - products_);
  return random_signs(n_, columns, options_.seed, products_, tensor_options_);
}

void HutchinsonProcess::use(const at::Tensor& signs, const at::Tensor& product) {
  const at::Tensor terms = signs * product;
  estimate_.add(diagonal_ ? terms : terms.sum(0, /*keepdim=*/false, at::kDouble));
  ++calls_;
  done_ = products_ == options_.num_samples ||
          (options_.tol.has_value() && calls_ % calls_per_test_ == 0 && is_accurate());
}

bool HutchinsonProcess::is_accurate() const {
  const at::Tensor error = norms(estimate_.standard_error().flatten(), 0);
  return (error <= *options_.tol * norms(estimate_.mean().flatten(), 0)).item<bool>();
}

std::vector<at::Tensor> HutchinsonProcess::make_result() {
  return {estimate_.mean(), estimate_.standard_error()};
}

}  // namespace torchium::linalg::detail

namespace torchium::linalg {
namespace {

StochasticEstimate estimate(bool diagonal, const LinearOperator& A,
                            const HutchinsonOptions& options) {
  detail::HutchinsonProcess process(diagonal, A.size(), options, A.is_dense(), A.options());
  const auto result = process.run(A);
  return {result[0], result[1], process.products()};
}

}  // namespace

StochasticEstimate hutchinson_trace(const LinearOperator& A, const HutchinsonOptions& options) {
  return estimate(false, A, options);
}

StochasticEstimate hutchinson_diagonal(const LinearOperator& A, const HutchinsonOptions& options) {
  return estimate(true, A, options);
}

}  // namespace torchium::linalg
