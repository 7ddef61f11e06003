#include "linalg/roots/device_newton.h"

#include "linalg/roots/newton.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <limits>
#include <optional>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/inverse_root/small_inverse_root.h"
#include "cuda_kernels/split_gemm/symmetric_product.h"
#include "linalg/roots/large_inverse_root.h"
#include "linalg/roots/root_schedule_table.h"
#include "support/device_code.h"
#include "support/side_streams.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/irange.h>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA

// A bound of the entries of roots of semi-definite matrices, in units of floor^(-1/p): for p = 1
// the last step, far outside its interval, leaves up to 98.
constexpr float kLargestDeviceRoot = 2 * static_cast<float>(kLargestNewtonRoot);

namespace {

// For small matrices the kernels use an interval that is twice as long: their schedules, which end
// with the last step, need no additional step for it, and errors close to the floor are three times
// smaller. Residuals are about the same.
NewtonLimits device_limits(int64_t n) {
  NewtonLimits limits = newton_limits(n, at::kFloat);
  limits.lowest_start = std::max(16 * limits.unit_roundoff, limits.noise);
  return limits;
}

}  // namespace

bool has_device_root(const at::Tensor& A, int64_t p) {
  if (!A.is_cuda() || A.scalar_type() != at::kFloat || A.numel() == 0 ||
      p > std::numeric_limits<int>::max()) {
    return false;
  }
  const cudaDeviceProp* device = at::cuda::getDeviceProperties(A.get_device());
  const auto shared_bytes = static_cast<int>(device->sharedMemPerBlockOptin);
  const auto n = static_cast<int>(A.size(-1));
  const bool has_kernel =
      n <= cuda_kernels::kLargestSmallOrder
          ? device->major >= 8 && cuda_kernels::small_inverse_root_shared_bytes(n) <= shared_bytes
          : cuda_kernels::has_symmetric_product(device->major, device->minor, shared_bytes);
  return has_kernel && root_schedule_table(p, device_limits(n).lowest_level()) != nullptr;
}

namespace {

// A batch, its outputs and the workspace of its kernels.
class Solve {
 public:
  // root: undefined: new memory.
  Solve(const at::Tensor& A, int64_t p, double eps, double relative_eps,
        const at::Tensor& root = {})
      : input_(A.contiguous()),
        outputs_{root.defined() ? root : at::empty_like(input_), new_numbers(at::kFloat),
                 new_numbers(at::kDouble), new_numbers(at::kLong), new_numbers(at::kDouble)} {
    torchium::detail::check_device_code(A.device());
    const int64_t n = A.size(-1);
    const NewtonLimits limits = device_limits(n);
    schedules_ = root_schedule_table(p, limits.lowest_level());
    arguments = {.A = input_.const_data_ptr<float>(),
                 .root = outputs_.root.mutable_data_ptr<float>(),
                 .residual = outputs_.residual.mutable_data_ptr<float>(),
                 .damping = outputs_.damping.mutable_data_ptr<double>(),
                 .floor = outputs_.floor.mutable_data_ptr<double>(),
                 .iterations = outputs_.iterations.mutable_data_ptr<int64_t>(),
                 .matrices = A.size(0),
                 .rule = {.n = static_cast<int>(n),
                          .p = static_cast<int>(p),
                          .eps = eps,
                          .relative_eps = relative_eps,
                          .least_damping = 0.0,
                          .noise = limits.noise,
                          .noise_margin = NewtonLimits::kNoiseMargin,
                          .lowest_start = limits.lowest_start,
                          .smallest_floor = limits.smallest_floor,
                          // The root of M is at most 2^22 for p = 1, 2^11 for p = 2.
                          .first = p == 1 ? 0x1p-10f : 1.0f,
                          .residual_tolerance = static_cast<float>(kNewtonResidualTolerance),
                          .largest_root = kLargestDeviceRoot}};
    if (n > cuda_kernels::kLargestSmallOrder) {
      memory_.emplace(A.size(0), static_cast<int>(n), A.options());
    }
  }

  void run(cudaStream_t stream) const {
    if (memory_) {
      large_inverse_root(arguments, *schedules_, *memory_, stream);
    } else {
      C10_CUDA_CHECK(cuda_kernels::small_inverse_root(arguments, *schedules_, stream));
    }
  }

  const DeviceRoot& outputs() const { return outputs_; }

  cuda_kernels::InverseRoot arguments;

 private:
  at::Tensor new_numbers(at::ScalarType dtype) const {
    return at::empty({input_.size(0)}, input_.options().dtype(dtype));
  }

  at::Tensor input_;
  DeviceRoot outputs_;
  const cuda_kernels::RootScheduleTable* schedules_ = nullptr;
  std::optional<LargeRootMemory> memory_;
};

Solve solve_of(const RootRenewal& batch, int64_t p, double eps, double relative_eps,
               const at::Tensor& keep) {
  TORCH_INTERNAL_ASSERT(batch.A.is_contiguous() && batch.roots.is_contiguous() &&
                        batch.failures.is_contiguous());
  Solve solve(batch.A, p, eps, relative_eps, batch.roots);
  solve.arguments.failures = batch.failures.mutable_data_ptr<int32_t>();
  if (batch.divisors.defined()) {
    TORCH_INTERNAL_ASSERT(batch.divisors.is_contiguous());
    solve.arguments.divisors = batch.divisors.const_data_ptr<double>();
  }
  if (keep.defined()) {
    solve.arguments.keep = keep.const_data_ptr<bool>();
  }
  return solve;
}

constexpr size_t kMostStreams = 8;
constexpr int64_t kMemoryAtOnce = int64_t{1} << 30;  // bytes of workspaces, as of one large batch

int64_t workspace_bytes(const RootRenewal& batch) {
  const int64_t n = batch.A.size(-1);
  return n <= cuda_kernels::kLargestSmallOrder
             ? 0
             : std::min(large_root_buffer_limit(n), 4 * 4 * batch.A.size(0) * n * n);
}

}  // namespace

DeviceRoot device_inverse_root(const at::Tensor& A, int64_t p, double eps, double relative_eps) {
  const c10::cuda::CUDAGuard device_guard(A.device());
  const Solve solve(A, p, eps, relative_eps);
  solve.run(c10::cuda::getCurrentCUDAStream());
  return solve.outputs();
}

DeviceRoot device_inverse(const at::Tensor& A, const at::Tensor& dampings, double least_damping) {
  const c10::cuda::CUDAGuard device_guard(A.device());
  TORCH_INTERNAL_ASSERT(dampings.is_contiguous() && dampings.scalar_type() == at::kDouble);
  Solve solve(A, /*p=*/1, /*eps=*/0.0, /*relative_eps=*/0.0);
  solve.arguments.eps = dampings.const_data_ptr<double>();
  solve.arguments.rule.least_damping = least_damping;
  solve.run(c10::cuda::getCurrentCUDAStream());
  return solve.outputs();
}

void device_inverse_where(const at::Tensor& A, double damping, const at::Tensor& wanted,
                          const at::Tensor& inverses) {
  const c10::cuda::CUDAGuard device_guard(A.device());
  TORCH_INTERNAL_ASSERT(wanted.is_contiguous() && inverses.is_contiguous());
  Solve solve(A, /*p=*/1, damping, /*relative_eps=*/0.0, inverses);
  solve.arguments.wanted = wanted.const_data_ptr<bool>();
  solve.run(c10::cuda::getCurrentCUDAStream());
}

void renew_inverse_roots(const std::vector<RootRenewal>& batches, int64_t p, double eps,
                         double relative_eps, const at::Tensor& keep) {
  for (size_t begin = 0; begin < batches.size();) {
    const c10::Device device = batches[begin].A.device();
    const c10::cuda::CUDAGuard device_guard(device);
    std::vector<Solve> solves;
    int64_t bytes = 0;
    for (; begin < batches.size(); ++begin) {
      bytes += workspace_bytes(batches[begin]);
      if (!solves.empty() && bytes > kMemoryAtOnce) {
        break;
      }
      solves.push_back(solve_of(batches[begin], p, eps, relative_eps, keep));
    }
    torchium::detail::SideStreams streams(device, std::min(kMostStreams, solves.size()));
    for (const auto i : c10::irange(solves.size())) {
      solves[i].run(streams[i % streams.size()]);
    }
    streams.join();
  }
}

#else

bool has_device_root(const at::Tensor& A, int64_t p) { return false; }

DeviceRoot device_inverse_root(const at::Tensor& A, int64_t p, double eps, double relative_eps) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

DeviceRoot device_inverse(const at::Tensor& A, const at::Tensor& dampings, double least_damping) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

void device_inverse_where(const at::Tensor& A, double damping, const at::Tensor& wanted,
                          const at::Tensor& inverses) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

void renew_inverse_roots(const std::vector<RootRenewal>& batches, int64_t p, double eps,
                         double relative_eps, const at::Tensor& keep) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::linalg::detail
