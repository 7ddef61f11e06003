#include "linalg/products/batched_products.h"
#include <torchium/linalg/products.h>
#include <torchium/memory.h>

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <limits>

#ifdef TORCHIUM_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>

#include <cublas_v2.h>
#include <dlfcn.h>
#endif

namespace {

namespace linalg = torchium::linalg;

at::Tensor positive_definite(int64_t n) {
  const auto X = torch::randn({n, 2 * n}, torch::kFloat64);
  return X.matmul(X.mT()) + torch::eye(n, torch::kFloat64);
}

void expect_close(const at::Tensor& x, const at::Tensor& y, double tolerance = 1e-10) {
  ASSERT_EQ(x.sizes(), y.sizes());
  EXPECT_LE((x - y).abs().max().item<double>(), tolerance * (1 + y.abs().max().item<double>()));
}

TEST(Products, KroneckerOperatorsAgreeWithTheProductItself) {
  torch::manual_seed(0);
  const auto A = positive_definite(3), B = positive_definite(4);
  const auto X = torch::randn({2, 12, 5}, torch::kFloat64);
  const auto K = linalg::kron(A, B);
  expect_close(K, torch::kron(A, B));
  expect_close(linalg::kron_matmul(A, B, X), K.matmul(X));
  const auto damped = K + 0.5 * torch::eye(12, torch::kFloat64);
  expect_close(damped.matmul(linalg::kron_solve(A, B, X, 0.5)), X);
  expect_close(K.matmul(linalg::kron_solve(A, B, X)), X);
}

TEST(Products, KroneckerOperatorsTakeLists) {
  torch::manual_seed(0);
  const std::vector<at::Tensor> A{positive_definite(3), positive_definite(2), positive_definite(3)};
  const std::vector<at::Tensor> B{positive_definite(4), positive_definite(5), positive_definite(4)};
  std::vector<at::Tensor> X;
  for (const int64_t n : {12, 10, 12}) X.push_back(torch::randn({n, 2}, torch::kFloat64));
  const auto products = linalg::kron_matmul(A, B, X);
  const auto solutions = linalg::kron_solve(A, B, X, 0.5);
  for (size_t i = 0; i < X.size(); ++i) {
    expect_close(products[i], linalg::kron_matmul(A[i], B[i], X[i]));
    expect_close(solutions[i], linalg::kron_solve(A[i], B[i], X[i], 0.5));
  }
  EXPECT_THROW(linalg::kron_matmul(A, B, {X[0]}), c10::ValueError);
}

TEST(Products, SpdSolversInvert) {
  torch::manual_seed(0);
  const auto A = positive_definite(6), X = torch::randn({6, 2}, torch::kFloat64);
  const auto damped = A + 0.5 * torch::eye(6, torch::kFloat64);
  expect_close(damped.matmul(linalg::spd_inverse(A, 0.5)), torch::eye(6, torch::kFloat64));
  expect_close(A.matmul(linalg::spd_solve(A, X)), X);
}

TEST(Products, ChunkedMatmulGivesTheProductInAnyWorkspace) {
  torch::manual_seed(0);
  const auto A = torch::randn({3, 1, 20, 30}).to(torch::kBFloat16);
  const auto B = torch::randn({2, 30, 10}).to(torch::kBFloat16);
  const auto whole = linalg::chunked_matmul(A, B);
  for (const int64_t bytes : {300, 5000, 100000}) {
    EXPECT_TRUE(torch::equal(linalg::chunked_matmul(A, B, bytes), whole)) << bytes;
  }
  EXPECT_THROW(linalg::chunked_matmul(A, B, 100), c10::ValueError);
}

TEST(Products, FusedMulAddWritesToOutAndToLists) {
  torch::manual_seed(0);
  const auto a = torch::randn({3, 4}), b = torch::randn({4}), c = torch::randn({3, 4});
  const auto expected = a * b + c;
  auto out = torch::empty({3, 4});
  EXPECT_EQ(linalg::fused_mul_add(a, b, c, out).data_ptr(), out.data_ptr());
  expect_close(out, expected, 1e-6);
  linalg::fused_mul_add_({a, a}, {b, a}, {c, out});
  expect_close(c, expected, 1e-6);
  expect_close(out, a * a + expected, 1e-6);
}

TEST(Products, DerivativesReachCppPrograms) {
  torch::manual_seed(0);
  const auto with_grad = [](at::IntArrayRef shape) {
    return torch::randn(shape, torch::TensorOptions(torch::kFloat64).requires_grad(true));
  };
  const auto a = with_grad({3, 1}), b = with_grad({4}), c = with_grad({});
  linalg::fused_mul_add(a, b, c).sum().backward();
  expect_close(a.grad(), b.detach().sum().expand({3, 1}));
  expect_close(b.grad(), a.detach().sum().expand({4}));
  expect_close(c.grad(), torch::tensor(12.0, torch::kFloat64));

  const auto A = with_grad({2, 3, 4}), B = with_grad({4, 5});
  linalg::chunked_matmul(A, B).sum().backward();
  expect_close(A.grad(), B.detach().sum(1).expand({2, 3, 4}));
  expect_close(B.grad(), A.detach().sum(at::IntArrayRef{0, 1}).unsqueeze(1).expand({4, 5}));

  const auto X = with_grad({4, 1});
  const auto identity = torch::eye(2, torch::kFloat64);
  linalg::kron_matmul(identity, 3 * identity, X).sum().backward();
  expect_close(X.grad(), torch::full({4, 1}, 3.0, torch::kFloat64));
}

TEST(Products, NoDerivativeIsAnError) {
  const auto A = torch::eye(2).requires_grad_();
  EXPECT_THROW(linalg::spd_inverse(A), c10::Error);
  const torch::NoGradGuard no_grad;
  expect_close(linalg::spd_inverse(A), torch::eye(2), 1e-6);
}

TEST(Products, WrongArgumentsAreValueErrors) {
  const auto A = torch::eye(2);
  EXPECT_THROW(linalg::kron(A, torch::eye(2, torch::kFloat64)), c10::ValueError);
  EXPECT_THROW(linalg::kron_matmul(A, A, torch::eye(3)), c10::ValueError);
  EXPECT_THROW(linalg::kron_solve(A, A, torch::eye(4), -1.0), c10::ValueError);
  EXPECT_THROW(linalg::spd_solve(A, torch::eye(3)), c10::ValueError);
  EXPECT_THROW(linalg::spd_inverse(A, std::numeric_limits<double>::infinity()), c10::ValueError);
  EXPECT_THROW(linalg::fused_mul_add(A, A, A, torch::zeros({1})), c10::ValueError);
  EXPECT_THROW(linalg::fused_mul_add_({A}, {A}, {}), c10::ValueError);
  EXPECT_THROW(linalg::fused_mul_add(A, A, A.to(torch::kInt)), c10::ValueError);
  EXPECT_THROW(linalg::fused_mul_add(A, A, at::Tensor()), c10::Error);
}

TEST(Memory, CpuHasNoCudaMemory) {
  const auto info = torchium::cuda_memory_info(torch::Device(torch::kCPU));
  EXPECT_FALSE(info.available);
  EXPECT_EQ(info.total_memory, 0);
  EXPECT_GT(torchium::free_memory(torch::kCPU), int64_t{1} << 20);
  EXPECT_THROW(torchium::cuda_memory_info(torch::Device(torch::kMeta)), c10::ValueError);
}

TEST(Memory, TheDefaultDeviceIsTheCurrentGpu) {
  const auto info = torchium::cuda_memory_info();
  EXPECT_EQ(info.available, torch::cuda::is_available());
  if (!info.available) {
    EXPECT_EQ(info.total_memory + info.free_memory + info.allocated_memory + info.cached_memory, 0);
    return;
  }
  const auto tensor = torch::empty({1 << 20}, torch::kCUDA);
  const auto after = torchium::cuda_memory_info();
  EXPECT_GE(after.allocated_memory, info.allocated_memory + (int64_t{4} << 20));
  EXPECT_LE(after.allocated_memory, after.cached_memory);
  EXPECT_LE(after.free_memory, after.total_memory);
  EXPECT_THROW(torchium::cuda_memory_info(torch::Device(torch::kCUDA, 99)), c10::ValueError);
}

#ifdef TORCHIUM_WITH_CUDA
// torch's own products expect alpha and beta on the host.
TEST(Products, LeaveThePointerModeOfCublasAfterAnError) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "no CUDA device";
  }
  // That of the library which torch has loaded.
  const auto get_mode = reinterpret_cast<decltype(&cublasGetPointerMode_v2)>(
      dlsym(RTLD_DEFAULT, "cublasGetPointerMode_v2"));
  ASSERT_NE(get_mode, nullptr);
  const auto mode = [&] {
    cublasPointerMode_t found = CUBLAS_POINTER_MODE_DEVICE;
    EXPECT_EQ(get_mode(at::cuda::getCurrentCUDABlasHandle(), &found), CUBLAS_STATUS_SUCCESS);
    return found;
  };
  const auto one = torch::ones({}, torch::kCUDA);
  const auto add_gram = [&](const at::Tensor& X) {
    auto C = torch::zeros({1, 8, 8}, torch::kCUDA);
    linalg::detail::gram_update_(C, X, /*transposed=*/false, one.const_data_ptr<float>(),
                                 one.const_data_ptr<float>(),
                                 linalg::detail::MatmulPrecision::kHighest);
    return C;
  };
  // cuBLAS refuses a leading dimension of 0.
  EXPECT_THROW(add_gram(torch::ones({1, 8, 0}, torch::kCUDA)), c10::Error);
  EXPECT_EQ(mode(), CUBLAS_POINTER_MODE_HOST);
  EXPECT_TRUE(torch::equal(add_gram(torch::ones({1, 8, 8}, torch::kCUDA)),
                           torch::full({1, 8, 8}, 8.0, torch::kCUDA)));
  EXPECT_EQ(mode(), CUBLAS_POINTER_MODE_HOST);
}
#endif

}  // namespace
